//! Drains: the broker dies at each place of one, meets a full disk in it, and is
//! asked by somebody who may not.

use super::world::{World, alive};
use crate::control::{ConnId, Peer};
use ringmain::ErrorCode;
use ringmain::control::{Purpose, Reply, Request};

/// A producer and a consumer, with messages in every state that there is.
fn busy() -> World {
    let mut world = World::new(1);
    world.create_queue("jobs", 60_000);
    world.settle();
    let producer = world.open(false).unwrap();
    world.attach(producer, "jobs", Purpose::Produce, 0);
    let consumer = world.open(false).unwrap();
    world.attach(consumer, "jobs", Purpose::Consume, 4);
    // Stored, some of it leased, acked or given back.
    world.send(producer, 0, &[10, 20, 30, 40, 50]);
    world.settle();
    world.take(consumer, 3);
    world.ack(consumer, 1, 0);
    world.settle();
    world.nack(consumer, 1, 0, 0, true);
    // Taken in, and not stored.
    world.send(producer, 0, &[60, 70]);
    world.pass();
    // In the rings.
    world.take(consumer, 1);
    world.ack(consumer, 1, 0);
    world.send(producer, 0, &[80, 90, 100]);
    world.flush(producer, true);
    world
}

/// Everybody's session is about to end.
fn part(world: &mut World) {
    for client in 0..world.clients.len() {
        world.read_answers(client);
        world.client_dies(client);
    }
}

/// The calls of a drain, the one with number `fatal.0` dying at place `fatal.1`.
/// Gives how many calls it made, and whether it came to its end.
fn drain(world: &mut World, fatal: Option<(u32, u32)>) -> (u32, bool) {
    let conn = world.new_conn();
    let mut calls = 0;
    let mut arm = |world: &mut World| {
        world.fuse = fatal.filter(|at| at.0 == calls).map(|at| at.1);
        calls += 1;
    };
    arm(world);
    world.request(conn, alive(), Request::Stop { drain: true });
    while world.core.as_mut().is_some_and(|core| !core.stop_due()) {
        arm(world);
        world.pass();
        while !world.jobs.is_empty() {
            world.run_job(0);
            arm(world);
            world.finish_job(0);
        }
        world.now_ns += 1_000_000;
    }
    arm(world);
    let done = world.call(|core| core.finish_stop().unwrap()).is_some();
    if done {
        let reply = world.replies.get_mut(&conn).unwrap().pop_front();
        assert!(matches!(reply, Some((Reply::Ok(_), _))), "{reply:?}");
    }
    (calls, done)
}

fn files(world: &World) -> usize {
    std::fs::read_dir(world.dir.path()).unwrap().count()
}

// I1, I2, I10
#[test]
fn a_drain_that_dies_at_any_place_loses_nothing() {
    let (mut call, mut deaths) = (0, 0);
    loop {
        let mut place = 0;
        let calls = loop {
            let mut world = busy();
            part(&mut world);
            let (calls, done) = drain(&mut world, Some((call, place)));
            if !done {
                deaths += 1;
                world.start();
                // The successor may die in its own.
                if !drain(&mut world, Some((call % 3, place))).1 {
                    deaths += 1;
                    world.start();
                    assert!(drain(&mut world, None).1);
                }
            }
            assert_eq!(files(&world), 0, "call {call}, place {place}");
            // Who waits to hear of the sync does not connect again.
            let producer = &world.clients[0];
            assert_eq!(producer.cursors(), (producer.tail(), producer.tail()));
            world.broker_dies();
            world.start();
            world.check_drained();
            if done {
                break calls;
            }
            place += 1;
        };
        call += 1;
        if call == calls {
            break;
        }
    }
    assert!(deaths > 60, "it died at {deaths} places only");
}

fn ask(world: &mut World, peer: Peer) -> (ConnId, Option<ErrorCode>) {
    let conn = world.new_conn();
    let reply = world.request(conn, peer, Request::Stop { drain: true });
    (conn, reply.map(code))
}

fn code(reply: (Reply, Vec<std::os::fd::OwnedFd>)) -> ErrorCode {
    match reply.0 {
        Reply::Error(error) => error.code,
        other => panic!("an answer before its time: {other:?}"),
    }
}

// I1: what the disk has no room for is not given up.
#[test]
fn a_drain_is_refused_on_a_full_disk_and_service_goes_on() {
    let mut world = busy();
    world.store.set_room(0);
    let (_, refused) = ask(&mut world, alive());
    assert_eq!(refused, Some(ErrorCode::StoreUnavailable));
    assert!(!world.core.as_mut().unwrap().stop_due());
    // Nobody was disturbed, and others can come.
    world.settle();
    let more = world.open(false).unwrap();
    world.attach(more, "jobs", Purpose::Produce, 0);
    world.send(more, 0, &[5]);
    world.check_drained();
}

// I1, I10: the disk fills up behind the first look at it.
#[test]
fn a_drain_that_meets_a_full_disk_is_given_up_and_can_be_repeated() {
    let mut world = busy();
    part(&mut world);
    let (conn, refused) = ask(&mut world, alive());
    assert_eq!(refused, None);
    world.store.set_room(0);
    let mut looks = 0;
    while world.replies.get(&conn).is_none_or(|r| r.is_empty()) {
        world.now_ns += 100_000_000;
        world.settle();
        assert!(!world.core.as_mut().unwrap().stop_due());
        // For what that has answered.
        world.pass();
        looks += 1;
        assert!(looks < 100, "nobody notices");
    }
    let reply = world.replies.get_mut(&conn).unwrap().pop_front();
    assert_eq!(reply.map(code), Some(ErrorCode::StoreUnavailable));
    // The sessions are closed, and what they sent is kept.
    assert!(files(&world) > 2);
    let fresh = world.open(false).unwrap();
    world.client_dies(fresh);
    world.store.set_room(u64::MAX);
    world.now_ns += 100_000_000;
    assert!(drain(&mut world, None).1);
    assert_eq!(files(&world), 0);
    world.broker_dies();
    world.start();
    world.check_drained();
}

#[test]
fn another_user_may_not_stop_the_broker() {
    let mut world = busy();
    let stranger = Peer {
        uid: nix::unistd::geteuid().as_raw() + 1,
        ..alive()
    };
    let (_, refused) = ask(&mut world, stranger);
    assert_eq!(refused, Some(ErrorCode::NotPermitted));
    assert!(!world.core.as_mut().unwrap().stop_due());
    world.check_drained();
}

#[test]
fn a_broker_that_is_drained_takes_no_new_work() {
    let mut world = busy();
    part(&mut world);
    let (_, refused) = ask(&mut world, alive());
    assert_eq!(refused, None);
    assert!(world.open(false).is_none());
    let conn = world.new_conn();
    let name = "more".to_owned();
    let create = Request::QueueCreate {
        name,
        settings: ringmain::QueueSettings::default(),
    };
    let reply = world.request(conn, alive(), create);
    assert_eq!(reply.map(code), Some(ErrorCode::Closed));
    let reply = world.request(conn, alive(), Request::Stats).unwrap().0;
    assert!(matches!(reply, Reply::Ok(_)), "{reply:?}");
}
