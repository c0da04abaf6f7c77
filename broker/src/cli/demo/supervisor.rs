//! Starts the processes, kills some, and waits until all has arrived.

use super::Args;
use super::board::{Board, Counter};
use super::input;
use super::process::Process;
use super::report::{Kill, PeakMemory, Report};
use super::roles::queue_name;
use super::tally::{Received, Sent, Tally};
use crate::cli::exit::Failure;
use crate::cli::interrupt::Interrupt;
use crate::cli::progress;
use indicatif::ProgressBar;
use ringmain::{Client, ErrorCode, QueueSettings};
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// Arguments of different types.
macro_rules! words {
    ($($word:expr),* $(,)?) => {
        [$(OsString::from($word)),*]
    };
}

/// Between two looks at everything.
const TICK: Duration = Duration::from_millis(10);
/// How long the broker may take to start or stop.
const BROKER_PATIENCE: Duration = Duration::from_secs(20);
/// How long another process may take to stop.
const STOP_PATIENCE: Duration = Duration::from_secs(10);

/// The temporary folders, and where things lie in them.
struct Folders {
    data: TempDir,
    shm: TempDir,
}

impl Folders {
    fn make(shm_parent: &Path) -> Result<Folders, Failure> {
        let make = |parent: &Path| {
            tempfile::Builder::new()
                .prefix("ringmain-demo-")
                .tempdir_in(parent)
                .map_err(|e| Failure::io(format_args!("no folder in {}", parent.display()), &e))
        };
        Ok(Folders {
            data: make(&std::env::temp_dir())?,
            shm: make(shm_parent)?,
        })
    }

    /// Here, because the path of a socket must be short.
    fn socket(&self) -> PathBuf {
        self.shm.path().join("socket")
    }

    fn file(&self, name: &str) -> PathBuf {
        self.data.path().join(name)
    }
}

/// A producer's number, its process, and its board, which outlives the process.
struct Producer {
    number: u32,
    process: Option<Process>,
    board: Board,
    sent: Sent,
}

/// A consumer process. One that is started again is another one.
struct Consumer {
    queue: u32,
    process: Process,
    board: Board,
    records: PathBuf,
}

/// Who is killed, and when.
#[derive(Debug, Clone, Copy)]
enum Victim {
    Consumer,
    Producer,
    Broker,
}

struct Supervisor<'a> {
    args: &'a Args,
    interrupt: &'a Interrupt,
    progress: ProgressBar,
    // Processes come before the folders that they use: fields are dropped in
    // this order.
    broker: Process,
    producers: Vec<Producer>,
    consumers: Vec<Consumer>,
    folders: Folders,
    /// Killed consumers.
    past: Vec<Consumer>,
    kills: Vec<Kill>,
    peak: PeakMemory,
    started: Instant,
}

pub(super) fn run(args: &Args, interrupt: &Interrupt) -> Result<Report, Failure> {
    let folders = Folders::make(&args.shm_dir)?;
    let source = input::prepare(args.input.as_deref(), &folders.file("input"), args.messages)?;
    interrupt.check()?;
    let mut broker = start_broker(&folders)?;
    broker.wait_for_line(BROKER_PATIENCE)?;
    let client = Client::connect_to(folders.socket())?;
    for queue in 0..args.queues {
        client.create_queue(&queue_name(queue), &QueueSettings::default())?;
    }
    let mut supervisor = Supervisor {
        args,
        interrupt,
        progress: progress::bar(Some(args.messages), "received"),
        broker,
        producers: Vec::new(),
        consumers: Vec::new(),
        folders,
        past: Vec::new(),
        kills: Vec::new(),
        peak: PeakMemory::default(),
        started: Instant::now(),
    };
    let outcome = supervisor.run(&client);
    supervisor.progress.finish_and_clear();
    let took = outcome?;
    supervisor.report(source, took)
}

impl Supervisor<'_> {
    /// Returns how long it took until all had arrived.
    fn run(&mut self, client: &Client) -> Result<Duration, Failure> {
        for number in 0..self.args.consumers {
            let consumer = self.start_consumer(number % self.args.queues)?;
            self.consumers.push(consumer);
        }
        self.started = Instant::now();
        for number in 0..self.args.producers {
            self.start_producer(number)?;
        }
        self.watch(client)?;
        let took = self.started.elapsed();
        for consumer in &mut self.consumers {
            consumer.process.stop(STOP_PATIENCE)?;
        }
        self.broker.stop(BROKER_PATIENCE)?;
        Ok(took)
    }

    /// Looks after everything until all has arrived, or nothing has arrived for
    /// too long: then the tally will tell what is missing.
    fn watch(&mut self, client: &Client) -> Result<(), Failure> {
        let mut plan = self.plan().into_iter().peekable();
        let mut moved = (0, Instant::now());
        loop {
            self.interrupt.check()?;
            let (sent, taken) = (self.sent(), self.taken());
            self.progress.set_position(taken.min(self.args.messages));
            self.look_at_processes()?;
            if let Some((_, victim)) = plan.next_if(|&(due, _)| taken >= due || self.all_sent()) {
                self.kill(victim)?;
                continue;
            }
            if self.all_sent() && self.is_drained(client)? {
                return Ok(());
            }
            if moved.0 != sent + taken {
                moved = (sent + taken, Instant::now());
            }
            if moved.1.elapsed() > self.args.patience {
                return Ok(());
            }
            std::thread::sleep(TICK);
        }
    }

    /// Who is killed when so many messages have been received.
    fn plan(&self) -> Vec<(u64, Victim)> {
        if self.args.no_kills {
            return Vec::new();
        }
        let part = |percent: u64| self.args.messages * percent / 100;
        vec![
            (part(20), Victim::Consumer),
            (part(35), Victim::Producer),
            (part(50), Victim::Broker),
        ]
    }

    // --- looking

    fn sent(&self) -> u64 {
        let boards = self.producers.iter().map(|p| &p.board);
        boards.map(|board| board.get(Counter::Accepted)).sum()
    }

    fn taken(&self) -> u64 {
        let boards = self.consumers.iter().chain(&self.past).map(|c| &c.board);
        boards.map(|board| board.get(Counter::Taken)).sum()
    }

    fn all_sent(&self) -> bool {
        self.producers.iter().all(|p| p.process.is_none())
    }

    fn is_drained(&self, client: &Client) -> Result<bool, Failure> {
        match client.stats() {
            Ok(stats) => Ok(stats.messages == 0),
            // A broker that was just started again.
            Err(e) if e.code() == ErrorCode::NotRunning => Ok(false),
            Err(e) => Err(e.into()),
        }
    }

    /// Notes their memory, and whether a producer is done. None may end
    /// otherwise.
    fn look_at_processes(&mut self) -> Result<(), Failure> {
        self.broker.must_run()?;
        self.peak.note_broker(self.broker.peak_memory());
        for producer in &mut self.producers {
            if let Some(process) = &mut producer.process {
                self.peak.note_producer(process.peak_memory());
                if process.has_ended()? {
                    producer.process = None;
                }
            }
        }
        for consumer in &mut self.consumers {
            consumer.process.must_run()?;
            self.peak.note_consumer(consumer.process.peak_memory());
        }
        Ok(())
    }

    // --- killing

    fn kill(&mut self, victim: Victim) -> Result<(), Failure> {
        let killed = Instant::now();
        let pid = match victim {
            Victim::Consumer => {
                let queue = self.consumers[0].queue;
                let heir = self.start_consumer_after_kill(queue)?;
                let old = std::mem::replace(&mut self.consumers[0], heir);
                let pid = old.process.pid();
                self.past.push(old);
                pid
            }
            Victim::Producer => {
                let Some(number) = self.producers.iter().position(|p| p.process.is_some()) else {
                    return Ok(());
                };
                self.kill_producer(number)?
            }
            Victim::Broker => {
                let pid = self.broker.pid();
                self.broker.kill()?;
                self.broker = start_broker(&self.folders)?;
                self.broker.wait_for_line(BROKER_PATIENCE)?;
                pid
            }
        };
        let kill = Kill {
            what: match victim {
                Victim::Consumer => "consumer",
                Victim::Producer => "producer",
                Victim::Broker => "broker",
            },
            pid,
            after_messages: self.taken(),
            back_after_ms: killed.elapsed().as_millis() as u64,
        };
        self.progress
            .set_message(format!("(killed {}: {})", kill.what, kill.pid));
        self.kills.push(kill);
        Ok(())
    }

    fn start_consumer_after_kill(&mut self, queue: u32) -> Result<Consumer, Failure> {
        self.consumers[0].process.kill()?;
        self.start_consumer(queue)
    }

    /// Kills a producer, and has another process go on where it was.
    fn kill_producer(&mut self, index: usize) -> Result<u32, Failure> {
        let producer = &mut self.producers[index];
        let Some(process) = &mut producer.process else {
            return Ok(0);
        };
        let pid = process.pid();
        process.kill()?;
        let intended = producer.board.get(Counter::Intended);
        let accepted = producer.board.get(Counter::Accepted);
        producer.sent.in_doubt.extend(accepted..intended);
        producer.board.set(Counter::Accepted, intended);
        let number = producer.number;
        let process = self.producer_process(number, intended)?;
        self.producers[index].process = Some(process);
        Ok(pid)
    }

    // --- starting

    fn start_producer(&mut self, number: u32) -> Result<(), Failure> {
        let producer = Producer {
            number,
            board: Board::create(&self.folders.file(&format!("producer-{number}.board")))?,
            process: Some(self.producer_process(number, 0)?),
            sent: Sent {
                count: self.share(number),
                in_doubt: Vec::new(),
            },
        };
        self.producers.push(producer);
        Ok(())
    }

    /// How many messages this producer sends.
    fn share(&self, number: u32) -> u64 {
        let producers = u64::from(self.args.producers);
        (self.args.messages + producers - 1 - u64::from(number)) / producers
    }

    fn producer_process(&self, number: u32, from: u64) -> Result<Process, Failure> {
        let board = self.folders.file(&format!("producer-{number}.board"));
        Process::start(
            format!("producer-{number}"),
            self.folders.data.path(),
            &words![
                "producer",
                "--broker-socket",
                self.folders.socket(),
                "--board",
                board,
                "--input",
                self.folders.file("input"),
                "--queues",
                self.args.queues.to_string(),
                "--number",
                number.to_string(),
                "--producers",
                self.args.producers.to_string(),
                "--from",
                from.to_string(),
                "--to",
                self.share(number).to_string(),
            ],
        )
    }

    fn start_consumer(&self, queue: u32) -> Result<Consumer, Failure> {
        let name = format!("consumer-{}", self.consumers.len() + self.past.len());
        let board = self.folders.file(&format!("{name}.board"));
        let records = self.folders.file(&format!("{name}.records"));
        let arguments = words![
            "consumer",
            "--broker-socket",
            self.folders.socket(),
            "--board",
            &board,
            "--records",
            &records,
            "--queue",
            queue.to_string(),
        ];
        Ok(Consumer {
            queue,
            board: Board::create(&board)?,
            process: Process::start(name, self.folders.data.path(), &arguments)?,
            records,
        })
    }

    // --- counting

    fn report(&self, source: String, took: Duration) -> Result<Report, Failure> {
        let sent: Vec<Sent> = self.producers.iter().map(|p| p.sent.clone()).collect();
        let received = self
            .past
            .iter()
            .chain(&self.consumers)
            .map(|c| Received::read(&c.records, c.board.get(Counter::Acking)))
            .collect::<Result<Vec<Received>, Failure>>()?;
        let tally = Tally::count(&sent, &received);
        let mut peak = self.peak;
        for producer in &self.producers {
            peak.note_producer(producer.board.get(Counter::PeakMemory));
        }
        for consumer in &self.consumers {
            peak.note_consumer(consumer.board.get(Counter::PeakMemory));
        }
        Ok(Report::new(source, &tally, took, self.kills.clone(), peak))
    }
}

fn start_broker(folders: &Folders) -> Result<Process, Failure> {
    Process::start(
        "broker".to_owned(),
        folders.data.path(),
        &words![
            "broker",
            "--broker-socket",
            folders.socket(),
            "--data-dir",
            folders.file("store"),
            "--shm-dir",
            folders.shm.path().join("segments"),
        ],
    )
}
