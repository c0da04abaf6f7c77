use super::fake::FakeBroker;
use crate::control::WINDOW_MAX;
use crate::lock;
use crate::{Client, ConsumerOptions, Error, QueueSettings};
use ringmain_ring::layout::Geometry;
use std::os::unix::net::UnixListener;

#[test]
fn where_nobody_listens_no_broker_is_running() {
    let folder = tempfile::tempdir().expect("folder");
    let stale = folder.path().join("stale.sock");
    drop(UnixListener::bind(&stale).expect("binds"));
    let file = folder.path().join("file");
    std::fs::write(&file, "").expect("writes");
    for socket in [
        stale,
        file.clone(),
        file.join("below"),
        folder.path().join("absent"),
    ] {
        match Client::connect_to(&socket).map(|_| ()) {
            Err(Error::NotRunning { socket: named }) => assert_eq!(named, socket),
            other => panic!("{} gave {other:?}", socket.display()),
        }
    }
}

#[test]
fn a_path_that_no_socket_can_have_is_invalid() {
    let long = std::path::PathBuf::from("/tmp").join("x".repeat(200));
    assert!(matches!(Client::connect_to(long), Err(Error::Invalid(_))));
}

#[test]
fn a_broker_of_another_protocol_is_told_apart() {
    let broker = FakeBroker::start();
    lock(&broker.state).protocol += 1;
    let error = Client::connect_to(broker.socket()).expect_err("another version");
    assert!(matches!(error, Error::VersionMismatch(_)));
    assert!(
        error.to_string().contains("9.9.9"),
        "names the broker's version: {error}"
    );
}

#[test]
fn names_settings_and_windows_are_checked_before_the_broker_is_asked() {
    let broker = FakeBroker::start();
    let client = broker.client();
    for name in ["", " jobs", "jo\nbs", &"x".repeat(201)] {
        assert!(
            matches!(client.producer(name), Err(Error::Invalid(_))),
            "{name:?}"
        );
        assert!(
            matches!(client.delete_queue(name), Err(Error::Invalid(_))),
            "{name:?}"
        );
    }
    let short = QueueSettings {
        visibility_timeout_ms: 1,
        ..QueueSettings::default()
    };
    assert!(matches!(
        client.create_queue("jobs", &short),
        Err(Error::Invalid(_))
    ));
    for window in [0, WINDOW_MAX + 1] {
        let options = ConsumerOptions::new().window(window);
        let refused = client.consumer_with("jobs", options);
        assert!(matches!(refused, Err(Error::Invalid(_))), "{window}");
    }
}

#[test]
fn a_missing_queue_is_named() {
    let client = FakeBroker::start();
    let client = client.client();
    for error in [
        client.producer("missing").map(|_| ()),
        client.consumer("missing").map(|_| ()),
        client.queue("missing").map(|_| ()),
    ] {
        match error {
            Err(Error::NoSuchQueue(name)) => assert_eq!(name, "missing"),
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn administration_reconnects_after_a_restart() {
    let mut broker = FakeBroker::start();
    let client = broker.client();
    client
        .create_queue("jobs", &QueueSettings::default())
        .expect("creates");
    assert_eq!(client.queues().expect("lists")[0].name, "jobs");
    broker.kill();
    assert!(matches!(client.stats(), Err(Error::NotRunning { .. })));
    broker.listen();
    client.stats().expect("asks the next broker");
    client.delete_queue("jobs").expect("deletes");
}

#[test]
fn producers_share_a_session_whatever_their_messages() {
    let broker = FakeBroker::start();
    let client = broker.client();
    let small = client.producer("small").expect("opens");
    lock(&broker.state).settings.max_message_bytes = 1 << 30;
    let large = client.producer("large").expect("opens");
    assert_eq!(
        small.send("a").expect("sends").session,
        large.send("b").expect("sends").session
    );
    assert_eq!(large.max_message_bytes(), 1 << 30);
}

#[test]
fn a_consumer_has_a_ring_for_the_answers_of_its_window() {
    let broker = FakeBroker::start();
    lock(&broker.state).settings.max_message_bytes = 1 << 30;
    let client = broker.client();
    let options = ConsumerOptions::new().window(WINDOW_MAX);
    let _consumer = client.consumer_with("jobs", options).expect("opens");
    let geometry = broker.newest().map.geometry();
    assert!(geometry.submission_bytes >= WINDOW_MAX * 64);
    // Large payloads do not go through it.
    assert_eq!(geometry.delivery_bytes, Geometry::default().delivery_bytes);
}
