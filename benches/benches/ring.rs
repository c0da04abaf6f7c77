//! The ring alone, in one process: what a record costs before any broker.
//!
//! `cargo bench -p ringmain-benches --bench ring`
//!
//! *one by one* publishes and frees every record, *in batches* every 32. Both
//! sides run on one thread, so that nothing but the ring's own work is counted;
//! *two threads* adds what cache lines cost on their way between two cores.
#![allow(missing_docs)]

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use ringmain_ring::layout::Geometry;
use ringmain_ring::record_ring::{Reader, Ring, Writer};
use ringmain_ring::segment::create;
use ringmain_ring::session::SessionMap;
use std::hint::{black_box, spin_loop};
use std::thread;
use std::time::{Duration, Instant};
use tempfile::TempDir;

const CONTENTS: [usize; 3] = [64, 256, 1024];
const BATCH: u64 = 32;

fn session() -> (TempDir, SessionMap) {
    let folder = tempfile::tempdir_in("/dev/shm").expect("a folder in /dev/shm");
    let path = folder.path().join("session");
    let geometry = Geometry::default();
    let file = create(&path, geometry.segment_bytes() as u64).expect("shared memory");
    let map = SessionMap::initialise(&file, &path, geometry, 1, 1).expect("a mapping");
    (folder, map)
}

fn write(writer: &mut Writer, ring: Ring<'_>, content: &[u8]) -> bool {
    let Ok(slot) = writer.begin(ring, 1, 0, content.len()).expect("no damage") else {
        return false;
    };
    slot.put_bytes(0, content);
    true
}

/// Copies the next record out, if there is one. Returns its end.
fn read(reader: &mut Reader, ring: Ring<'_>, content: &mut Vec<u8>) -> Option<u64> {
    let record = reader.next(ring).expect("no damage")?;
    content.clear();
    ring.area
        .append_to(record.offset as usize, record.len as usize, content);
    black_box(&content);
    Some(record.end())
}

/// Writes and reads `batch` records at a time, both cursors once each.
fn on_one_thread(criterion: &mut Criterion, name: &str, batch: u64) {
    let mut group = criterion.benchmark_group(name);
    group.throughput(Throughput::Elements(batch));
    for bytes in CONTENTS {
        let (_folder, map) = session();
        let ring = map.submission();
        let (mut writer, mut reader) = (Writer::new(0, 0), Reader::new(0, 0));
        let (content, mut out) = (vec![7; bytes], Vec::new());
        group.bench_function(BenchmarkId::from_parameter(bytes), |bencher| {
            bencher.iter(|| {
                for _ in 0..batch {
                    assert!(write(&mut writer, ring, black_box(&content)));
                }
                writer.publish(ring);
                let mut end = reader.next_position();
                while let Some(next) = read(&mut reader, ring, &mut out) {
                    end = next;
                }
                reader.free(ring, end);
            });
        });
    }
    group.finish();
}

/// A turn of waiting: a hundred spins, then yields, as the client's first two
/// steps are. Sleeping is the third, and is not measured here.
fn wait(turns: &mut u32) {
    *turns += 1;
    if *turns < 100 {
        spin_loop();
    } else {
        thread::yield_now();
    }
}

/// Time for `records` from one thread to another, neither of which sleeps.
fn stream(ring: Ring<'_>, start: u64, records: u64, batch: u64, bytes: usize) -> (Duration, u64) {
    thread::scope(|scope| {
        scope.spawn(move || {
            let (mut writer, content) = (Writer::new(start, start), vec![7; bytes]);
            for number in 1..=records {
                let mut turns = 0;
                while !write(&mut writer, ring, black_box(&content)) {
                    writer.publish(ring);
                    wait(&mut turns);
                }
                if number % batch == 0 || number == records {
                    writer.publish(ring);
                }
            }
        });
        let (mut reader, mut out) = (Reader::new(start, start), Vec::new());
        let begun = Instant::now();
        let (mut read_so_far, mut end, mut turns) = (0, start, 0);
        while read_so_far < records {
            match read(&mut reader, ring, &mut out) {
                Some(next) => {
                    end = next;
                    read_so_far += 1;
                    turns = 0;
                    if read_so_far % batch == 0 {
                        reader.free(ring, end);
                    }
                }
                None => {
                    reader.free(ring, end);
                    wait(&mut turns);
                }
            }
        }
        reader.free(ring, end);
        (begun.elapsed(), end)
    })
}

fn between_two_threads(criterion: &mut Criterion, name: &str, batch: u64) {
    let mut group = criterion.benchmark_group(name);
    group.throughput(Throughput::Elements(1));
    for bytes in CONTENTS {
        let (_folder, map) = session();
        let mut position = 0;
        group.bench_function(BenchmarkId::from_parameter(bytes), |bencher| {
            bencher.iter_custom(|records| {
                let streamed = stream(map.submission(), position, records, batch, bytes);
                position = streamed.1;
                streamed.0
            });
        });
    }
    group.finish();
}

fn ring(criterion: &mut Criterion) {
    on_one_thread(criterion, "one by one", 1);
    on_one_thread(criterion, "in batches of 32", BATCH);
    between_two_threads(criterion, "two threads, one by one", 1);
    between_two_threads(criterion, "two threads, in batches of 32", BATCH);
}

criterion_group!(benches, ring);
criterion_main!(benches);
