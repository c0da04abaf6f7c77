//! The demo's processes: this program, started again with a role.

use super::board::{Board, Counter};
use super::input::Texts;
use super::message::{Head, now_ns, queue_of};
use super::process::peak_memory;
use super::tally::Record;
use crate::cli::exit::{FAILED, Failure};
use crate::cli::interrupt::Interrupt;
use crate::cli::{Global, serve};
use nix::sys::prctl;
use nix::sys::signal::Signal;
use nix::unistd::{Pid, getppid};
use ringmain::{Client, Confirm, ErrorCode, Message, Producer, ProducerOptions};
use std::fs::{File, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Messages taken, recorded and acked together.
const BATCH_MAX: usize = 64;
/// How long one wait lasts, before signals are looked at.
const PATIENCE: Duration = Duration::from_millis(50);
/// How long the broker may be away when a process starts.
const OPEN_PATIENCE: Duration = Duration::from_secs(20);

/// What a process of the demo is to be.
#[derive(Debug, clap::Args)]
pub(in crate::cli) struct RoleArgs {
    /// The supervisor: whoever outlives it ends
    #[arg(long)]
    parent: i32,
    #[command(subcommand)]
    role: Role,
}

#[derive(Debug, clap::Subcommand)]
enum Role {
    Broker(BrokerArgs),
    Producer(ProducerArgs),
    Consumer(ConsumerArgs),
}

/// The broker
#[derive(Debug, clap::Args)]
pub(super) struct BrokerArgs {
    #[arg(long)]
    broker_socket: PathBuf,
    #[arg(long)]
    data_dir: PathBuf,
    #[arg(long)]
    shm_dir: PathBuf,
}

/// A producer
#[derive(Debug, clap::Args)]
pub(super) struct ProducerArgs {
    #[arg(long)]
    broker_socket: PathBuf,
    #[arg(long)]
    board: PathBuf,
    #[arg(long)]
    input: PathBuf,
    #[arg(long)]
    queues: u32,
    /// Its number, and how many there are
    #[arg(long)]
    number: u32,
    #[arg(long)]
    producers: u32,
    /// Its messages: from this number up to below that
    #[arg(long)]
    from: u64,
    #[arg(long)]
    to: u64,
}

/// A consumer
#[derive(Debug, clap::Args)]
pub(super) struct ConsumerArgs {
    #[arg(long)]
    broker_socket: PathBuf,
    #[arg(long)]
    board: PathBuf,
    #[arg(long)]
    records: PathBuf,
    #[arg(long)]
    queue: u32,
}

/// Name of the queue with this number.
pub(super) fn queue_name(number: u32) -> String {
    format!("demo-{number}")
}

pub(in crate::cli) fn run(args: &RoleArgs) -> Result<(), Failure> {
    end_with(args.parent)?;
    match &args.role {
        Role::Broker(args) => broker(args),
        Role::Producer(args) => produce(args),
        Role::Consumer(args) => consume(args),
    }
}

/// Has the kernel kill this process when its parent ends.
fn end_with(parent: i32) -> Result<(), Failure> {
    prctl::set_pdeathsig(Signal::SIGKILL)
        .map_err(|e| Failure::io("cannot follow the supervisor", &e.into()))?;
    // It may have ended before that.
    if getppid() != Pid::from_raw(parent) {
        return Err(Failure::new(FAILED, "the supervisor is gone"));
    }
    Ok(())
}

fn broker(args: &BrokerArgs) -> Result<(), Failure> {
    let global = Global {
        socket: Some(args.broker_socket.clone()),
    };
    let serve = serve::Args::for_folders(&args.data_dir, &args.shm_dir);
    serve::run(&global, &serve)
}

/// Sends its messages one by one, so that one at most is in doubt when it is
/// killed, and notes each before and after.
fn produce(args: &ProducerArgs) -> Result<(), Failure> {
    let board = Board::open(&args.board)?;
    let producers = with_patience(|| open_producers(args))?;
    let input = |e| Failure::io("cannot read the demo's input", &e);
    let mut texts = Texts::open(&args.input).map_err(input)?;
    let stride = u64::from(args.producers);
    texts
        .skip(u64::from(args.number) + args.from * stride)
        .map_err(input)?;

    let (mut text, mut payload) = (Vec::new(), Vec::new());
    for sequence in args.from..args.to {
        texts.next(&mut text).map_err(input)?;
        let head = Head {
            producer: args.number,
            sequence,
            sent_ns: now_ns(),
        };
        head.write(&text, &mut payload);
        let producer = &producers[queue_of(sequence, args.queues) as usize];
        board.set(Counter::Intended, sequence + 1);
        producer.send(&payload)?;
        board.set(Counter::Accepted, sequence + 1);
        texts.skip(stride - 1).map_err(input)?;
    }
    for producer in &producers {
        producer.flush(Confirm::Stored)?;
    }
    board.set(Counter::PeakMemory, peak_memory("self"));
    Ok(())
}

fn open_producers(args: &ProducerArgs) -> ringmain::Result<Vec<Producer>> {
    let client = Client::connect_to(&args.broker_socket)?;
    let options = ProducerOptions::new().confirm(Confirm::Accepted);
    (0..args.queues)
        .map(|queue| client.producer_with(&queue_name(queue), options.clone()))
        .collect()
}

/// Opens something again and again: the broker may be killed at any moment, also
/// while somebody connects.
fn with_patience<T>(open: impl Fn() -> ringmain::Result<T>) -> ringmain::Result<T> {
    let deadline = Instant::now() + OPEN_PATIENCE;
    loop {
        let error = match open() {
            Ok(opened) => return Ok(opened),
            Err(error) => error,
        };
        let passes = matches!(
            error.code(),
            ErrorCode::NotRunning | ErrorCode::Closed | ErrorCode::Io | ErrorCode::TimedOut
        );
        if !passes || Instant::now() >= deadline {
            return Err(error);
        }
        std::thread::sleep(PATIENCE);
    }
}

/// Receives until it is told to stop. Each message is in the record file before
/// it is acked.
fn consume(args: &ConsumerArgs) -> Result<(), Failure> {
    let interrupt = Interrupt::catch()?;
    let board = Board::open(&args.board)?;
    let mut records = open_records(&args.records)?;
    let mut consumer = with_patience(|| {
        Client::connect_to(&args.broker_socket)?.consumer(&queue_name(args.queue))
    })?;
    let mut taken = 0;
    let mut batch: Vec<Message> = Vec::with_capacity(BATCH_MAX);
    let mut bytes = Vec::with_capacity(BATCH_MAX * Record::BYTES);
    while !interrupt.came() {
        let Some(first) = consumer.recv_timeout(PATIENCE)? else {
            continue;
        };
        batch.push(first);
        while batch.len() < BATCH_MAX
            && let Some(message) = consumer.try_recv()?
        {
            batch.push(message);
        }
        bytes.clear();
        let now_ns = now_ns();
        for message in &batch {
            Record::of(message, args.queue, now_ns).write(&mut bytes);
        }
        records
            .write_all(&bytes)
            .map_err(|e| Failure::io("cannot write the record", &e))?;
        taken += batch.len() as u64;
        board.set(Counter::Taken, taken);
        board.set(Counter::Acking, taken);
        Message::ack_batch(batch.drain(..))?;
        board.set(Counter::Acked, taken);
    }
    board.set(Counter::PeakMemory, peak_memory("self"));
    Ok(consumer.flush_timeout(Confirm::Stored, Duration::from_secs(5))?)
}

fn open_records(path: &Path) -> Result<File, Failure> {
    OpenOptions::new()
        .create_new(true)
        .append(true)
        .open(path)
        .map_err(|e| Failure::io(path.display(), &e))
}
