use super::fake::{FakeBroker, Seen, until};
use crate::lock;
use crate::{Confirm, Error};
use ringmain_ring::wait::{broker, client};
use std::time::Duration;

#[test]
fn sends_and_acks_go_on_while_the_broker_is_away() {
    let mut broker = FakeBroker::start();
    let client = broker.client();
    let mut consumer = client.consumer("jobs").expect("opens");
    let mut consuming = broker.newest();
    let producer = client.producer("jobs").expect("opens");
    let mut producing = broker.newest();
    consuming.deliver(0, b"x");
    broker.kill();
    consumer.recv().expect("receives").ack().expect("acks");
    producer.send("while away").expect("sends");
    assert!(matches!(consuming.take_all()[..], [Seen::Ack(_)]));
    assert_eq!(producing.sends(1), [b"while away"]);
    assert!(
        consumer
            .recv_timeout(Duration::from_millis(120))
            .expect("waits")
            .is_none()
    );
    let over = producer.flush_timeout(Confirm::Stored, Duration::from_millis(120));
    assert!(matches!(over, Err(Error::TimedOut)));
}

#[test]
fn who_waits_takes_the_session_up_again() {
    let mut broker = FakeBroker::start();
    let mut consumer = broker.client().consumer("jobs").expect("opens");
    let mut peer = broker.newest();
    let receiver = std::thread::spawn(move || consumer.recv().map(|m| m.payload().to_vec()));
    peer.until_asleep_for(client::MESSAGES);
    broker.kill();
    std::thread::sleep(Duration::from_millis(100));
    broker.listen();
    until(|| lock(&broker.state).resumed == 1);
    peer.deliver(0, b"after");
    assert_eq!(
        receiver.join().expect("no panic").expect("receives"),
        b"after"
    );
    assert_eq!(lock(&broker.state).resumed, 1);
}

#[test]
fn who_only_sends_takes_the_session_up_again() {
    let mut broker = FakeBroker::start();
    let producer = broker.client().producer("jobs").expect("opens");
    let mut peer = broker.newest();
    broker.kill();
    producer.send("x").expect("sends");
    broker.listen();
    let resumed = || {
        producer.send("y").expect("sends");
        lock(&broker.state).resumed == 1
    };
    until(|| {
        std::thread::sleep(Duration::from_millis(5));
        resumed()
    });
    // The doorbell is the new broker's.
    peer.take_all();
    peer.map.broker_wait().announce(broker::SUBMISSIONS);
    producer.send("z").expect("sends");
    until(|| broker.was_rung(peer.map.session()));
}

#[test]
fn a_new_producer_waits_for_the_session_to_be_taken_up() {
    let mut broker = FakeBroker::start();
    let client = broker.client();
    let first = client.producer("jobs").expect("opens");
    broker.kill();
    broker.listen();
    let second = client.producer("other").expect("attaches");
    let ids = (
        first.send("x").expect("sends"),
        second.send("y").expect("sends"),
    );
    assert_eq!(ids.0.session, ids.1.session);
    broker.kill();
    assert!(matches!(
        client.producer("jobs"),
        Err(Error::NotRunning { .. })
    ));
}

#[test]
fn many_restarts_are_one_session() {
    let mut broker = FakeBroker::start();
    let producer = broker.client().producer("jobs").expect("opens");
    let mut peer = broker.newest();
    for restart in 1..=5 {
        broker.kill();
        broker.listen();
        until(|| {
            // Its waits are what finds out.
            let _ = producer.flush_timeout(Confirm::Stored, Duration::from_millis(20));
            lock(&broker.state).resumed == restart
        });
        peer.take_all();
    }
    assert_eq!(producer.send("x").expect("sends").session, 1);
}

#[test]
fn another_instance_does_not_get_the_session() {
    let mut broker = FakeBroker::start();
    let mut consumer = broker.client().consumer("jobs").expect("opens");
    broker.kill();
    lock(&broker.state).instance += 1;
    broker.listen();
    match consumer.recv() {
        Err(Error::Closed(why)) => assert!(why.contains("another broker"), "{why}"),
        other => panic!("{other:?}"),
    }
    assert_eq!(lock(&broker.state).resumed, 0);
}

#[test]
fn a_session_that_the_broker_does_not_know_is_closed() {
    let mut broker = FakeBroker::start();
    let producer = broker.client().producer("jobs").expect("opens");
    broker.kill();
    lock(&broker.state).resume_error = Some(Error::Invalid("no such session".to_owned()));
    broker.listen();
    let flushed = producer.flush(Confirm::Stored);
    assert!(matches!(flushed, Err(Error::Closed(_))), "{flushed:?}");
    assert!(matches!(producer.send("x"), Err(Error::Closed(_))));
}

#[test]
fn a_broker_that_can_not_yet_is_asked_again() {
    let mut broker = FakeBroker::start();
    let producer = broker.client().producer("jobs").expect("opens");
    broker.kill();
    let busy = Error::StoreUnavailable("still starting".to_owned());
    lock(&broker.state).resume_error = Some(busy);
    broker.listen();
    let before = lock(&broker.state).connections;
    let over = producer.flush_timeout(Confirm::Stored, Duration::from_millis(300));
    assert!(matches!(over, Err(Error::TimedOut)));
    let tries = lock(&broker.state).connections - before;
    assert!((2..=8).contains(&tries), "{tries} tries in 300 ms");
    lock(&broker.state).resume_error = None;
    let _ = producer.flush_timeout(Confirm::Stored, Duration::from_millis(300));
    assert_eq!(lock(&broker.state).resumed, 1);
}
