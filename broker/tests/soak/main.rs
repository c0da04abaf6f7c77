//! Random deaths and pauses of everybody, for as long as one likes, with a tally
//! kept outside (I1 to I7, I9, I10).
//!
//! `RINGMAIN_SECONDS` says how long (default 60), `RINGMAIN_SEED` where the
//! choices begin (default: the clock). Each minute everybody comes to an end, and
//! the tallies are compared.

#![allow(clippy::unwrap_used, reason = "a test that can't go on has failed")]
#![allow(clippy::print_stderr, reason = "the report of the run")]

mod audit;
#[path = "../common/mod.rs"]
mod common;

use audit::{Death, Tallies, Verdict, judge};
use common::{Broker, Entry, Kind, Process, Random, Role, wait_until, wait_used_up};
use ringmain::{Error, QueueSettings};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// After so long everybody comes to an end, and all is compared.
const EPOCH: Duration = Duration::from_secs(60);
const PRODUCERS: usize = 3;
const CONSUMERS: usize = 4;
/// How long a lease lasts: some pauses are longer.
const VISIBILITY: Duration = Duration::from_secs(2);

/// Not a test: what the children run.
#[test]
fn child_process() {
    common::run_child();
}

/// What was done to whom.
#[derive(Debug, Default)]
struct Deeds {
    killed_clients: u64,
    killed_brokers: u64,
    killed_all: u64,
    paused: u64,
    stopped_brokers: u64,
    drained: u64,
}

/// An epoch's processes.
struct Epoch<'a> {
    broker: &'a mut Broker,
    random: Random,
    deeds: &'a mut Deeds,
    producers: Vec<Process>,
    consumers: Vec<Process>,
    churn: Option<Process>,
    /// Those that are still there.
    living: Living,
    deaths: Vec<Death>,
    /// When drains began, and when they were over.
    drains: Vec<(u64, u64)>,
    next_producer: u64,
    /// Disturbed until then: what a death costs is not measured.
    troubled_until_ns: u64,
}

#[derive(Default)]
struct Living {
    producers: Vec<usize>,
    consumers: Vec<usize>,
}

fn now_ns() -> u64 {
    Entry::new(Kind::Done).at_ns
}

impl Epoch<'_> {
    fn start_producer(&mut self) {
        let process = self.broker.child(Role::MixedProduce {
            queue: "jobs".to_owned(),
            producer: self.next_producer,
            seed: self.random.next(),
        });
        self.next_producer += 1;
        self.living.producers.push(self.producers.len());
        self.producers.push(process);
    }

    fn start_consumer(&mut self) {
        // Most of the queue; one at a time of the dead letters.
        let process = self.broker.child(Role::MixedConsume {
            queue: "jobs".to_owned(),
            seed: self.random.next(),
        });
        self.living.consumers.push(self.consumers.len());
        self.consumers.push(process);
    }

    fn start_churn(&mut self) {
        let seed = self.random.next();
        self.churn = Some(self.broker.child(Role::Churn { seed }));
    }

    /// One thing that can happen.
    fn strike(&mut self) {
        match self.random.below(100) {
            0..35 => self.kill_consumer(),
            35..55 => self.kill_producer(),
            55..60 => {
                if let Some(mut churn) = self.churn.take() {
                    churn.kill();
                    self.deeds.killed_clients += 1;
                }
                self.start_churn();
            }
            60..75 => self.pause_somebody(),
            75..88 => self.kill_broker(),
            88..92 => self.pause_broker(),
            92..95 => self.stop_broker(),
            95..97 => self.drain(),
            _ => self.kill_all(),
        }
    }

    fn kill_consumer(&mut self) {
        let which = self.random.below(self.living.consumers.len() as u64) as usize;
        let which = self.living.consumers.swap_remove(which);
        let at_ns = now_ns();
        self.consumers[which].kill();
        self.deeds.killed_clients += 1;
        self.deaths.push(Death {
            consumer: which,
            at_ns,
            quiet: at_ns > self.troubled_until_ns,
        });
        self.start_consumer();
    }

    fn kill_producer(&mut self) {
        let which = self.random.below(self.living.producers.len() as u64) as usize;
        let which = self.living.producers.swap_remove(which);
        self.producers[which].kill();
        self.deeds.killed_clients += 1;
        self.start_producer();
    }

    /// Whoever is disturbed, and what has piled up since, is in order again a
    /// while later.
    fn trouble(&mut self) {
        self.troubled_until_ns = now_ns() + 200_000_000;
        for death in &mut self.deaths {
            death.quiet &= death.at_ns + 150_000_000 < now_ns();
        }
    }

    /// Mostly for a moment; sometimes for longer than every time-out.
    fn pause(&mut self) -> Duration {
        match self.random.below(5) {
            0 => VISIBILITY + Duration::from_millis(300 + self.random.below(1000)),
            _ => Duration::from_millis(self.random.below(200)),
        }
    }

    fn pause_somebody(&mut self) {
        let time = self.pause();
        self.trouble();
        self.deeds.paused += 1;
        let (list, all) = match self.random.below(3) {
            0 => (&self.living.producers, &self.producers),
            _ => (&self.living.consumers, &self.consumers),
        };
        let process = &all[list[self.random.below(list.len() as u64) as usize]];
        process.pause();
        std::thread::sleep(time);
        process.resume();
        self.trouble();
    }

    fn pause_broker(&mut self) {
        let time = self.pause();
        self.trouble();
        self.deeds.paused += 1;
        self.broker.pause();
        std::thread::sleep(time);
        self.broker.resume();
        self.trouble();
    }

    fn kill_broker(&mut self) {
        self.trouble();
        self.deeds.killed_brokers += 1;
        self.broker.kill();
        if self.random.below(3) == 0 {
            std::thread::sleep(Duration::from_millis(self.random.below(600)));
        }
        if self.random.below(4) == 0 {
            // And its successor while it starts.
            let starting = self.broker.spawn();
            std::thread::sleep(Duration::from_micros(self.random.below(40_000)));
            starting.kill();
            self.deeds.killed_brokers += 1;
        }
        self.broker.restart();
        self.trouble();
    }

    fn stop_broker(&mut self) {
        self.trouble();
        self.deeds.stopped_brokers += 1;
        self.broker.terminate();
        self.broker.restart();
        self.trouble();
    }

    /// Ends all sessions; their clients connect again.
    fn drain(&mut self) {
        self.trouble();
        self.deeds.drained += 1;
        let began_ns = now_ns();
        let drained = self.broker.run(&["stop", "--drain"]);
        let said = String::from_utf8_lossy(&drained.stderr).into_owned();
        assert!(drained.status.success(), "{said}");
        self.drains.push((began_ns, now_ns()));
        assert!(self.broker.reap().success());
        self.broker.restart();
        self.trouble();
    }

    fn kill_all(&mut self) {
        self.trouble();
        self.deeds.killed_all += 1;
        self.broker.kill_at_once();
        for (list, all) in [
            (&mut self.living.producers, &mut self.producers),
            (&mut self.living.consumers, &mut self.consumers),
        ] {
            for which in list.drain(..) {
                all[which].kill();
                self.deeds.killed_clients += 1;
            }
        }
        let _ = self.broker.reap();
        self.broker.restart();
        self.start_all();
        self.trouble();
    }

    fn start_all(&mut self) {
        for _ in 0..PRODUCERS {
            self.start_producer();
        }
        for _ in 0..CONSUMERS {
            self.start_consumer();
        }
    }

    /// Everybody comes to an end, when all that was sent is consumed.
    fn finish(&mut self) {
        if let Some(mut churn) = self.churn.take() {
            churn.finish();
        }
        for &which in &self.living.producers {
            self.producers[which].nudge();
        }
        for &which in &self.living.producers {
            self.producers[which].wait();
        }
        // What was rejected goes back, and is consumed with the rest.
        let client = self.broker.client();
        wait_used_up("messages to be consumed", || {
            let dead = match client.queue("jobs.dead") {
                Ok(info) => info.messages,
                Err(Error::NoSuchQueue(_)) => 0,
                Err(error) => panic!("{error}"),
            };
            if dead > 0 {
                client.redrive("jobs.dead", None, None).unwrap();
            }
            dead + client.queue("jobs").unwrap().messages
        });
        for &which in &self.living.consumers {
            self.consumers[which].nudge();
        }
        for &which in &self.living.consumers {
            self.consumers[which].wait();
        }
        // I7
        wait_until("all sessions are gone", || {
            client.stats().unwrap().sessions == 0 && self.broker.session_files().is_empty()
        });
        assert_eq!(client.stats().unwrap().leased, 0);
    }
}

fn number(variable: &str) -> Option<u64> {
    let text = std::env::var(variable).ok()?;
    Some(text.parse().expect("a number"))
}

#[test]
fn random_deaths_and_pauses_cost_nothing() {
    let time = Duration::from_secs(number("RINGMAIN_SECONDS").unwrap_or(60));
    let clock = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
    let seed = number("RINGMAIN_SEED").unwrap_or(clock.as_secs());
    eprintln!("soak: {} s from seed {seed}", time.as_secs());
    let started = Instant::now();
    let mut broker = Broker::start();
    let settings = QueueSettings {
        visibility_timeout_ms: VISIBILITY.as_millis() as u64,
        ..QueueSettings::default()
    };
    broker.create("jobs", &settings);
    let (mut deeds, mut total) = (Deeds::default(), Verdict::default());
    let mut epochs = 0;
    while started.elapsed() < time {
        let left = time - started.elapsed();
        let end = Instant::now() + left.min(EPOCH);
        let mut epoch = Epoch {
            broker: &mut broker,
            random: Random(seed.wrapping_add(epochs << 32)),
            deeds: &mut deeds,
            producers: Vec::new(),
            consumers: Vec::new(),
            churn: None,
            living: Living::default(),
            deaths: Vec::new(),
            drains: Vec::new(),
            next_producer: 1,
            troubled_until_ns: 0,
        };
        epoch.start_all();
        epoch.start_churn();
        while Instant::now() < end {
            std::thread::sleep(Duration::from_millis(epoch.random.below(250)));
            epoch.strike();
        }
        epoch.finish();
        let verdict = judge(&Tallies {
            producers: &epoch.producers,
            consumers: &epoch.consumers,
            deaths: &epoch.deaths,
            drains: &epoch.drains,
        });
        epochs += 1;
        total.add(verdict);
        drop(epoch);
        broker.forget_children();
        eprintln!(
            "after {} s: {total}; {deeds:?}",
            started.elapsed().as_secs()
        );
    }
    let Deeds {
        killed_clients,
        killed_brokers,
        killed_all,
        paused,
        stopped_brokers,
        drained,
    } = deeds;
    let kills = killed_clients + killed_brokers + killed_all;
    eprintln!(
        "soak: seed {seed}, {} s, {kills} kills ({killed_brokers} of brokers, {killed_all} of all at once), \
         {paused} pauses, {stopped_brokers} stops, {drained} drains; {total}; 0 violations",
        started.elapsed().as_secs()
    );
}
