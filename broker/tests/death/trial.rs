//! One death: a victim, what survivors do meanwhile, and what they find
//! afterwards.

use super::cases::{Broker as State, Case, QUEUE, Stage, number_of, payload};
use super::common::{BOUND, Broker, signal, wait_until};
use super::page::{Shared, Trap};
use super::tracer::{Step, Tracee};
use nix::sys::ptrace;
use nix::sys::signal::Signal;
use nix::unistd::{ForkResult, fork};
use ringmain::{Client, Confirm, Consumer, Producer, QueueSettings};
use std::collections::HashSet;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// A queue that the victim has nothing to do with.
const ELSEWHERE: &str = "elsewhere";
/// Numbers of messages that survivors send: while the victim stands still, and
/// when it waits for one.
const BYSTANDER: u64 = 1000;
const WAITED_FOR: u64 = 1001;

/// How a death went by.
pub struct Outcome {
    /// From the death, or the broker's return, until survivors had everything.
    pub delay: Duration,
}

/// What the run of an operation to its end has shown.
pub struct Traced {
    pub instructions: usize,
    /// Numbers of instructions behind stores to shared memory and system calls.
    pub effects: Vec<usize>,
}

/// What a session leaves behind must be none of these.
#[derive(Debug, PartialEq, Eq)]
struct Belongings {
    sessions: u64,
    producers: u32,
    consumers: u32,
    files: Vec<String>,
    descriptors: Vec<String>,
}

/// A broker and survivors.
pub struct World<'a> {
    case: &'a Case,
    broker: Broker,
    client: Client,
    sender: Producer,
    elsewhere: (Producer, Consumer),
    page: Shared,
    /// What is there between two deaths.
    settled: Option<Belongings>,
    /// The broker is in the state that the case asks for.
    staged: bool,
    state: Now,
}

/// Whether the broker serves.
#[derive(Debug, PartialEq, Eq)]
enum Now {
    Serving,
    Dead,
    Stopped,
}

impl<'a> World<'a> {
    pub fn new(case: &'a Case) -> World<'a> {
        let broker = Broker::with_queue(QUEUE);
        broker.create(ELSEWHERE, &QueueSettings::default());
        let client = broker.client();
        let sender = client.producer(QUEUE).unwrap();
        // Its payload segment is there before anybody counts.
        sender.send(payload(0, 100_000)).unwrap();
        let elsewhere = (
            client.producer(ELSEWHERE).unwrap(),
            client.consumer(ELSEWHERE).unwrap(),
        );
        let mut consumer = client.consumer(QUEUE).unwrap();
        consumer.recv().unwrap().ack().unwrap();
        consumer.flush(Confirm::Stored).unwrap();
        World {
            case,
            broker,
            client,
            sender,
            elsewhere,
            page: Shared::new(),
            settled: None,
            staged: false,
            state: Now::Serving,
        }
    }

    pub fn broker(&self) -> &Broker {
        &self.broker
    }

    /// Notes what is there before the first death.
    pub fn settle(&mut self) {
        let mut last = self.belongings();
        wait_until("the broker settles", || {
            std::thread::sleep(Duration::from_millis(20));
            let now = self.belongings();
            std::mem::replace(&mut last, now) == last
        });
        self.settled = Some(last);
    }

    fn belongings(&self) -> Belongings {
        let info = self.client.queue(QUEUE).unwrap();
        let folder = format!("/proc/{}/fd", self.broker.pid());
        let entries = std::fs::read_dir(folder).unwrap();
        let targets = entries.filter_map(|entry| std::fs::read_link(entry.unwrap().path()).ok());
        // Files of RocksDB come and go.
        let descriptors = targets.filter(|target| !target.starts_with(self.broker.data_dir()));
        // Without the numbers, which differ.
        let kind = |target: PathBuf| target.to_string_lossy().replace(char::is_numeric, "");
        let mut descriptors: Vec<String> = descriptors.map(kind).collect();
        descriptors.sort_unstable();
        Belongings {
            sessions: self.client.stats().unwrap().sessions,
            producers: info.producers,
            consumers: info.consumers,
            files: self.broker.session_files(),
            descriptors,
        }
    }

    /// Runs the operation once to its end, and kills the victim there.
    pub fn trace(&mut self) -> Traced {
        let mut victim = self.begin();
        let mut watch = Watch::new(self);
        let mut traced = Traced {
            instructions: 0,
            effects: vec![0],
        };
        loop {
            let step = victim.step();
            if step == Step::Breakpoint {
                break;
            }
            traced.instructions += 1;
            if step == Step::Waits {
                self.end_wait(&victim);
            }
            if step != Step::Plain {
                watch.look_for_files(self);
            }
            if watch.changed() || step != Step::Plain {
                traced.effects.push(traced.instructions);
            }
        }
        traced.effects.push(traced.instructions);
        traced.effects.dedup();
        self.end(&mut victim, true);
        traced
    }

    /// Kills the victim after so many instructions of the operation, or at its end
    /// if it has fewer this time.
    #[track_caller]
    pub fn kill_after(&mut self, instructions: usize) -> Outcome {
        let mut victim = self.begin();
        let mut ended = false;
        for done in 1..=instructions {
            match victim.step() {
                Step::Breakpoint => {
                    ended = true;
                    break;
                }
                // The last one: it dies waiting.
                Step::Waits if done == instructions => {}
                Step::Waits => self.end_wait(&victim),
                _ => {}
            }
        }
        self.end(&mut victim, ended)
    }

    /// A victim at the beginning of its operation.
    fn begin(&mut self) -> Tracee {
        self.page.clear();
        self.staged = false;
        let socket = self.broker.socket();
        // SAFETY: this process has one thread. The child forgets what it
        // inherits, and never returns from here.
        let victim = match unsafe { fork() }.unwrap() {
            ForkResult::Child => self.be_victim(&socket),
            ForkResult::Parent { child } => Tracee::new(child),
        };
        let status = nix::sys::wait::waitpid(victim.pid(), None).unwrap();
        assert!(matches!(status, nix::sys::wait::WaitStatus::Stopped(..)));
        ptrace::setoptions(victim.pid(), ptrace::Options::PTRACE_O_EXITKILL).unwrap();
        loop {
            victim.run_to_breakpoint();
            match self.page.trapped() {
                Trap::Send => self.send_as_asked(),
                Trap::Broker => self.stage_broker(),
                Trap::Begin => break,
                Trap::End => unreachable!("it has not begun"),
            }
        }
        if !self.staged {
            self.stage_broker();
        }
        victim
    }

    fn be_victim(&self, socket: &std::path::Path) -> ! {
        ptrace::traceme().unwrap();
        nix::sys::signal::raise(Signal::SIGSTOP).unwrap();
        let page = &*self.page;
        let stage = Stage { socket, page };
        let operation = self.case.prepare(&stage);
        page.trap(Trap::Begin);
        operation();
        page.trap(Trap::End);
        unreachable!("it is killed there")
    }

    fn send_as_asked(&self) {
        let (number, len) = (
            self.page.number.load(Ordering::Relaxed),
            self.page.len.load(Ordering::Relaxed),
        );
        self.sender.send(payload(number, len)).unwrap();
        // Seen by the broker, so that what follows finds it delivered, if there is
        // anybody to deliver it to.
        self.sender.flush(Confirm::Stored).unwrap();
        self.page.accepted.push(number);
    }

    fn stage_broker(&mut self) {
        self.staged = true;
        match self.case.broker {
            State::Asleep | State::Awake => {}
            State::Dead => {
                self.broker.kill();
                self.state = Now::Dead;
            }
            State::Stopped => {
                self.broker.pause();
                self.state = Now::Stopped;
            }
            State::Restarted => {
                self.broker.kill();
                self.broker.restart();
            }
        }
    }

    fn bring_back_the_broker(&mut self) {
        match std::mem::replace(&mut self.state, Now::Serving) {
            Now::Serving => {}
            Now::Dead => self.broker.restart(),
            Now::Stopped => self.broker.resume(),
        }
    }

    /// Gives the victim what it waits for.
    #[track_caller]
    fn end_wait(&mut self, victim: &Tracee) {
        self.bring_back_the_broker();
        if self.case.send_when_waiting && !self.page.accepted.get().contains(&WAITED_FOR) {
            self.page.number.store(WAITED_FOR, Ordering::Relaxed);
            self.page.len.store(64, Ordering::Relaxed);
            self.send_as_asked();
        }
        assert!(victim.wait_for(BOUND), "the victim waits for ever");
    }

    /// The death, and the look at what is left.
    #[track_caller]
    fn end(&mut self, victim: &mut Tracee, ended: bool) -> Outcome {
        let mut expected = Expected::new(&self.page, ended);
        let mut survivor = None;
        if self.state == Now::Serving {
            // While the victim stands still, others go on.
            self.sender.send(payload(BYSTANDER, 64)).unwrap();
            expected.must.insert(BYSTANDER);
            survivor = Some(self.client.consumer(QUEUE).unwrap());
            self.others_go_on();
        }
        let mut died = Instant::now();
        victim.kill();
        if self.state != Now::Serving {
            self.bring_back_the_broker();
            died = Instant::now();
        }
        let mut survivor = survivor.unwrap_or_else(|| self.client.consumer(QUEUE).unwrap());
        let mut delay = Duration::ZERO;
        while !expected.must.is_empty() {
            let message = survivor.recv_timeout(BOUND).unwrap();
            let message = message
                .unwrap_or_else(|| panic!("lost: {:?}; {}", expected.must, self.broker.log_text()));
            delay = died.elapsed();
            expected.takes(&message);
            message.ack().unwrap();
        }
        self.drain(&mut survivor, &mut expected);
        drop(survivor);
        let settled = self.settled.take().unwrap();
        let mut now = self.belongings();
        let started = Instant::now();
        while now != settled {
            assert!(
                started.elapsed() < BOUND,
                "left behind: {now:?}, not {settled:?}"
            );
            // After a restart of the broker: these take up their sessions.
            self.others_go_on();
            let idle = self.elsewhere.1.recv_timeout(Duration::from_millis(1));
            assert!(idle.unwrap().is_none());
            now = self.belongings();
        }
        self.settled = Some(settled);
        Outcome { delay }
    }

    #[track_caller]
    fn others_go_on(&mut self) {
        let (producer, consumer) = &mut self.elsewhere;
        producer.send("a bystander").unwrap();
        let message = consumer.recv_timeout(BOUND).unwrap();
        message.expect("others go on").ack().unwrap();
        producer.flush(Confirm::Stored).unwrap();
    }

    /// Until nothing is left. Takes what is in doubt, and fails on everything else.
    #[track_caller]
    fn drain(&self, survivor: &mut Consumer, expected: &mut Expected) {
        let started = Instant::now();
        loop {
            survivor.flush(Confirm::Stored).unwrap();
            let info = self.client.queue(QUEUE).unwrap();
            while let Some(message) = survivor.try_recv().unwrap() {
                expected.takes(&message);
                message.ack().unwrap();
            }
            if info.messages == 0 && info.leased == 0 {
                return;
            }
            assert!(started.elapsed() < BOUND, "left in the queue: {info:?}");
        }
    }
}

/// What survivors have to find.
struct Expected {
    /// Accepted, and not settled.
    must: HashSet<u64>,
    /// In doubt.
    may: HashSet<u64>,
    /// The last message of the victim's that came for the first time.
    last_first: u64,
}

impl Expected {
    fn new(page: &Shared, ended: bool) -> Expected {
        let mut must: HashSet<u64> = page.accepted.get().into_iter().collect();
        let mut may = HashSet::new();
        let sends = page.sends.get();
        match ended {
            true => must.extend(sends),
            false => may.extend(sends),
        }
        for acked in page.acks.get() {
            must.remove(&acked);
            if !ended {
                may.insert(acked);
            }
        }
        Expected {
            must,
            may,
            last_first: 0,
        }
    }

    #[track_caller]
    fn takes(&mut self, message: &ringmain::Message) {
        let number = number_of(message.payload()).expect("a whole payload");
        // I3, I4: once, and nothing else.
        let known = self.must.remove(&number) | self.may.remove(&number);
        assert!(known, "not sent, acked, or twice: {number}");
        // I2: those that the operation sends have ascending numbers from 1, those
        // before it from 100.
        if !message.redelivered() && number < 100 {
            assert!(
                number > self.last_first,
                "{number} after {}",
                self.last_first
            );
            self.last_first = number;
        }
    }
}

/// The victim's shared memory, to see its stores. Of a payload segment, the words
/// of its chunks: what is written into an unsent payload is nobody's concern.
struct Watch {
    files: Vec<(File, Vec<u8>)>,
    known: Vec<String>,
}

impl Watch {
    fn new(world: &World<'_>) -> Watch {
        let settled = world.settled.as_ref().unwrap();
        let mut watch = Watch {
            files: Vec::new(),
            known: settled.files.clone(),
        };
        watch.look_for_files(world);
        watch
    }

    fn look_for_files(&mut self, world: &World<'_>) {
        for name in world.broker.session_files() {
            if name.ends_with(".ledger") || self.known.contains(&name) {
                continue;
            }
            let Ok(file) = File::open(world.broker.shm_dir().join(&name)) else {
                continue;
            };
            let bytes = file.metadata().unwrap().len();
            // A word for each unit of a page.
            let watched = match name.ends_with(".ring") {
                true => bytes,
                false => bytes / (4096 + 8) * 8,
            };
            self.known.push(name);
            self.files.push((file, vec![0; watched as usize]));
        }
    }

    fn changed(&mut self) -> bool {
        let mut changed = false;
        for (file, last) in &mut self.files {
            let mut now = vec![0; last.len()];
            file.read_exact_at(&mut now, 0).unwrap();
            changed |= now != *last;
            *last = now;
        }
        changed
    }
}

/// Wakes a broker that a failing test left stopped, so that it can be killed.
impl Drop for World<'_> {
    fn drop(&mut self) {
        if self.state == Now::Stopped {
            signal(self.broker.pid(), Signal::SIGCONT);
        }
    }
}
