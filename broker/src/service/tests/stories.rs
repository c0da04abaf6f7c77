//! Single stories that chance finds too rarely.

use super::world::World;
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
