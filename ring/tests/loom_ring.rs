//! The record ring under loom: the code of `record_ring.rs`, in every order
//! that the memory model allows.
//!
//! `RUSTFLAGS="--cfg loom" cargo test --release -p ringmain-ring --test 'loom_*'`
//!
//! What loom can't see here: mappings, processes, and the copies of bytes of
//! `view.rs`, which it has in words of its own.
#![cfg(loom)]
#![allow(clippy::unwrap_used)]

mod model;

use loom::sync::Arc;
use loom::thread;
use model::{Memory, read_spinning, value, write};
use ringmain_ring::record_ring::{Reader, Writer};

/// I1: caught when the store of `tail` is not Release, or its load not Acquire.
#[test]
fn a_published_record_is_read_whole() {
    loom::model(|| {
        let memory = Arc::new(Memory::new(64, 0));
        let writer = thread::spawn({
            let memory = memory.clone();
            move || {
                let mut writer = Writer::new(0, 0);
                for n in 1..=2 {
                    write(&mut writer, memory.ring(), n);
                    writer.publish(memory.ring());
                }
            }
        });
        let mut reader = Reader::new(0, 0);
        for n in 1..=2 {
            assert_eq!(read_spinning(&mut reader, memory.ring()), n);
        }
        writer.join().unwrap();
        assert!(reader.next(memory.ring()).unwrap().is_none());
    });
}

/// I1: a batch is seen whole or not at all, which transactions rest on.
#[test]
fn a_batch_becomes_visible_at_once() {
    loom::model(|| {
        let memory = Arc::new(Memory::new(64, 0));
        let writer = thread::spawn({
            let memory = memory.clone();
            move || {
                let mut writer = Writer::new(0, 0);
                for n in 1..=3 {
                    write(&mut writer, memory.ring(), n);
                }
                writer.publish(memory.ring());
            }
        });
        let mut reader = Reader::new(0, 0);
        assert_eq!(read_spinning(&mut reader, memory.ring()), 1);
        for n in 2..=3 {
            let record = reader.next(memory.ring()).unwrap();
            let record = record.expect("the rest of the batch is there");
            assert_eq!(value(memory.ring(), &record), n);
        }
        writer.join().unwrap();
    });
}

/// I1: what is begun but not published is not there, in whatever order it was
/// written.
#[test]
fn an_unpublished_record_is_not_seen() {
    loom::model(|| {
        let memory = Arc::new(Memory::new(64, 0));
        let writer = thread::spawn({
            let memory = memory.clone();
            move || {
                let mut writer = Writer::new(0, 0);
                write(&mut writer, memory.ring(), 1);
                let published = writer.next_position();
                write(&mut writer, memory.ring(), 2);
                writer.publish_to(memory.ring(), published);
                // Dies here.
            }
        });
        let mut reader = Reader::new(0, 0);
        assert_eq!(read_spinning(&mut reader, memory.ring()), 1);
        assert!(reader.next(memory.ring()).unwrap().is_none());
        writer.join().unwrap();
        assert!(reader.next(memory.ring()).unwrap().is_none());
    });
}

/// I1: the padding before a wrapped record comes with it.
#[test]
fn a_record_that_wraps_is_read_whole() {
    loom::model(|| {
        // 8 bytes to the end: a record of 16 does not fit there.
        let memory = Arc::new(Memory::new(64, 40));
        let writer = thread::spawn({
            let memory = memory.clone();
            move || {
                let mut writer = Writer::new(40, 40);
                write(&mut writer, memory.ring(), 1);
                writer.publish(memory.ring());
                write(&mut writer, memory.ring(), 2);
                writer.publish(memory.ring());
            }
        });
        let mut reader = Reader::new(40, 40);
        for n in 1..=2 {
            assert_eq!(read_spinning(&mut reader, memory.ring()), n);
        }
        assert_eq!(reader.next_position(), 64 + 16);
        writer.join().unwrap();
    });
}

/// I1: padding may be published ahead of the record that it makes way for.
#[test]
fn padding_alone_is_nothing_to_read() {
    loom::model(|| {
        let memory = Arc::new(Memory::new(64, 56));
        let writer = thread::spawn({
            let memory = memory.clone();
            move || {
                let mut writer = Writer::new(56, 56);
                write(&mut writer, memory.ring(), 1);
                writer.publish_to(memory.ring(), 64);
                writer.publish(memory.ring());
            }
        });
        let mut reader = Reader::new(56, 56);
        assert_eq!(read_spinning(&mut reader, memory.ring()), 1);
        writer.join().unwrap();
    });
}

/// I1, I10: caught when the store of `head` is not Release, or its load not
/// Acquire: the writer then overwrites what the reader still copies.
#[test]
fn a_full_ring_is_not_overwritten_before_it_is_freed() {
    loom::model(|| {
        // Two records of 16 bytes fill it.
        let memory = Arc::new(Memory::new(32, 0));
        let writer = thread::spawn({
            let memory = memory.clone();
            move || {
                let mut writer = Writer::new(0, 0);
                for n in 1..=3 {
                    while !writer.fits(memory.ring(), 8).unwrap() {
                        thread::yield_now();
                    }
                    write(&mut writer, memory.ring(), n);
                    writer.publish(memory.ring());
                }
            }
        });
        let mut reader = Reader::new(0, 0);
        for n in 1..=3 {
            assert_eq!(read_spinning(&mut reader, memory.ring()), n);
            let position = reader.next_position();
            reader.free(memory.ring(), position);
        }
        writer.join().unwrap();
    });
}

/// I10: a successor reads again what its predecessor read and did not free, and
/// the writer has left that alone.
#[test]
fn what_a_dead_reader_did_not_free_is_still_there() {
    loom::model(|| {
        let memory = Arc::new(Memory::new(32, 0));
        let writer = thread::spawn({
            let memory = memory.clone();
            move || {
                let mut writer = Writer::new(0, 0);
                for n in 1..=2 {
                    write(&mut writer, memory.ring(), n);
                }
                writer.publish(memory.ring());
                if let Ok(slot) = writer.begin(memory.ring(), 1, 0, 8).unwrap() {
                    slot.put_u64(0, 3);
                    writer.publish(memory.ring());
                }
            }
        });
        let mut dead = Reader::new(0, 0);
        read_spinning(&mut dead, memory.ring());
        let freed = dead.next_position();
        dead.free(memory.ring(), freed);
        read_spinning(&mut dead, memory.ring());
        let mut successor = Reader::new(freed, freed);
        assert_eq!(read_spinning(&mut successor, memory.ring()), 2);
        writer.join().unwrap();
    });
}
