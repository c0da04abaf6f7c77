#![allow(clippy::unwrap_used, missing_docs, clippy::print_stderr)]
use ringmain_broker::service::*;
use std::time::*;
#[test]
fn smoke() {
    let data = tempfile::tempdir().unwrap();
    let shm = tempfile::tempdir_in("/dev/shm").unwrap();
    let socket = data.path().join("sock");
    let options = ServeOptions { data_dir: data.path().join("data"), shm_dir: shm.path().join("s"), socket: socket.clone(), disk_reserve_bytes: 1 << 20 };
    let (stop, handle) = Stop::new().unwrap();
    let (tx, rx) = std::sync::mpsc::channel();
    let t = std::thread::spawn(move || serve(&options, &stop, || tx.send(()).unwrap()));
    rx.recv().unwrap();
    let client = ringmain::Client::connect_to(&socket).unwrap();
    client.create_queue("jobs", &ringmain::QueueSettings::default()).unwrap();
    let producer = client.producer("jobs").unwrap();
    for i in 0..10 { producer.send(format!("hello {i}")).unwrap(); }
    producer.flush(ringmain::Confirm::Synced).unwrap();
    eprintln!("{:?}", client.stats().unwrap());
    let mut consumer = client.consumer("jobs").unwrap();
    for i in 0..10 { let m = consumer.recv_timeout(Duration::from_secs(2)).unwrap().unwrap(); assert_eq!(m.payload(), format!("hello {i}").as_bytes()); m.ack().unwrap(); }
    consumer.flush(ringmain::Confirm::Stored).unwrap();
    eprintln!("{:?}", client.stats().unwrap());
    let n = 3_000_000u64;
    let c2 = client.clone();
    let start = Instant::now();
    let p = std::thread::spawn(move || { let producer = c2.producer("jobs").unwrap(); let b=[7u8;64]; for _ in 0..n { producer.send(&b).unwrap(); } });
    for _ in 0..n { consumer.recv().unwrap().ack().unwrap(); }
    eprintln!("{:.2} M/s", n as f64 / start.elapsed().as_secs_f64() / 1e6);
    p.join().unwrap();
    consumer.flush(ringmain::Confirm::Stored).unwrap();
    eprintln!("{:?}", client.stats().unwrap());
    // backlog
    let start = Instant::now();
    for _ in 0..n { producer.send([7u8;256]).unwrap(); }
    producer.flush(ringmain::Confirm::Stored).unwrap();
    eprintln!("fill {:.2} M/s", n as f64 / start.elapsed().as_secs_f64() / 1e6);
    eprintln!("{:?}", client.stats().unwrap());
    let start = Instant::now();
    for _ in 0..n+0 { consumer.recv_timeout(Duration::from_secs(5)).unwrap().unwrap().ack().unwrap(); }
    consumer.flush(ringmain::Confirm::Stored).unwrap();
    eprintln!("drain {:.2} M/s", n as f64 / start.elapsed().as_secs_f64() / 1e6);
    eprintln!("{:?}", client.stats().unwrap());
    handle.stop();
    t.join().unwrap().unwrap();
}
