//! Single stories that chance finds too rarely.

use super::world::World;
use crate::store::Store;
use ringmain::control::Purpose;

fn do_jobs(world: &mut World) {
    while !world.jobs.is_empty() {
        world.run_job(0);
        world.finish_job(0);
    }
}

/// A successor refuses what its predecessor had accepted for a queue that was
/// deleted since, and is short of room for so many answers. What comes behind
/// them was taken in all the same.
#[test]
fn an_ack_behind_a_stalled_replay_holds() {
    let mut world = World::new(1);
    for name in ["jobs", "mail"] {
        world.create_queue(name, 400);
        world.settle();
    }
    let producer = world.open(false).unwrap();
    world.attach(producer, "jobs", Purpose::Produce, 0);
    let both = world.open(false).unwrap();
    world.attach(both, "jobs", Purpose::Consume, 2);
    world.attach(both, "mail", Purpose::Produce, 0);
    world.send(producer, 0, &[10, 20]);
    world.pass();
    world.take(both, 2);
    world.send(both, 0, &[1, 2, 3]);
    world.ack(both, 1, 0);
    world.pass();
    world.delete_queue("mail");
    world.pass();
    do_jobs(&mut world);
    world.broker_dies();
    world.start();
    // The model notices if the ack is said to be late, and nothing comes back.
    world.check_drained();
}

/// Nothing that is accepted is dropped, acks go on, and service resumes by
/// itself.
#[test]
fn on_a_full_disk_sends_wait_and_acks_go_on() {
    let mut world = World::new(1);
    world.create_queue("jobs", 400);
    world.settle();
    let producer = world.open(false).unwrap();
    world.attach(producer, "jobs", Purpose::Produce, 0);
    world.send(producer, 0, &[10]);
    world.settle();
    assert_eq!(unsettled(&world), 1);
    world.store.set_room(0);
    world.now_ns += 100_000_000;
    world.send(producer, 0, &[20, 30]);
    world.flush(producer, false);
    let consumer = world.open(false).unwrap();
    world.attach(consumer, "jobs", Purpose::Consume, 2);
    world.settle();
    assert!(world.core.as_ref().unwrap().disk_full);
    world.take(consumer, 1);
    world.ack(consumer, 1, 0);
    world.settle();
    world.now_ns += 100_000_000;
    world.settle();
    assert_eq!(
        unsettled(&world),
        0,
        "the first is settled, the others are not stored"
    );
    let confirmed = world.clients[producer].cursors().0;
    assert!(confirmed < world.clients[producer].tail());
    world.store.set_room(u64::MAX);
    world.now_ns += 100_000_000;
    world.settle();
    assert_eq!(unsettled(&world), 2);
    world.check_drained();
}

fn unsettled(world: &World) -> u64 {
    let queues = world.store.queues().unwrap();
    queues.iter().map(|queue| queue.unsettled).sum()
}
