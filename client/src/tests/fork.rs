use super::fake::{FakeBroker, Seen};
use crate::{Confirm, Error, Result};
use nix::sys::wait::{WaitStatus, waitpid};
use nix::unistd::{ForkResult, fork};
use std::time::Duration;

fn is_forked<T>(result: Result<T>) -> bool {
    matches!(result, Err(Error::Forked))
}

#[test]
fn a_child_can_only_drop_what_its_parent_made() {
    let broker = FakeBroker::start();
    let client = broker.client();
    let producer = client.producer("jobs").expect("opens");
    let mut consumer = client.consumer("jobs").expect("opens");
    let mut peer = broker.newest();
    for entry in 0..4 {
        peer.deliver(entry, b"x");
    }
    let mut held = consumer.recv_batch(4).expect("receives");
    // SAFETY: the child makes calls that end at once, frees memory, and exits
    // without running anything of the test.
    match unsafe { fork() }.expect("fork") {
        ForkResult::Child => {
            let all = is_forked(producer.send("x"))
                && is_forked(producer.try_send("x"))
                && is_forked(producer.send_batch(["x"]))
                && is_forked(producer.send_timeout("x", Duration::ZERO))
                && is_forked(producer.flush(Confirm::Stored))
                && is_forked(producer.flush(Confirm::Accepted))
                && is_forked(consumer.try_recv())
                && is_forked(consumer.recv())
                && is_forked(consumer.recv_timeout(Duration::ZERO))
                && is_forked(consumer.recv_batch(1))
                && is_forked(consumer.flush(Confirm::Synced))
                && is_forked(client.stats())
                && is_forked(client.queue("jobs"))
                && is_forked(client.producer("jobs"))
                && is_forked(client.consumer("jobs"))
                && held.pop().is_some_and(|message| is_forked(message.ack()))
                && held
                    .pop()
                    .is_some_and(|message| is_forked(message.nack(Duration::ZERO)))
                && held[0].extend(Duration::ZERO).is_err();
            drop((held, consumer, producer, client));
            // SAFETY: ends the child without running anything else.
            unsafe { libc::_exit(if all { 7 } else { 1 }) }
        }
        ForkResult::Parent { child } => {
            let status = waitpid(child, None).expect("waits");
            assert_eq!(status, WaitStatus::Exited(child, 7));
        }
    }
    assert_eq!(peer.take_all(), [], "the child wrote nothing");
    held.pop().expect("four").ack().expect("the parent goes on");
    producer.send("x").expect("the parent goes on");
    client.stats().expect("the parent goes on");
    assert!(matches!(peer.take_all()[..], [Seen::Ack(_)]));
}
