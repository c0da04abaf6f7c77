//! The status board: found by its name, read whole, whatever its writer does.
#![cfg(not(loom))]
#![allow(clippy::unwrap_used)]

use nix::sys::mman::shm_open;
use nix::{errno::Errno, fcntl::OFlag, sys::stat::Mode, unistd::ftruncate};
use ringmain_ring::board::{Board, remove};
use ringmain_ring::fault;
use ringmain_ring::segment::SegmentError;
use std::sync::atomic::{AtomicBool, Ordering};

/// A name that no other test has.
fn name(test: &str) -> String {
    format!("/ringmain-test-{}-{test}", std::process::id())
}

fn is_missing(outcome: Result<Board, SegmentError>) -> bool {
    let Err(SegmentError::Io { source, .. }) = outcome else {
        return false;
    };
    source.raw_os_error() == Some(Errno::ENOENT as i32)
}

#[test]
fn a_board_is_found_by_its_name_until_its_maker_goes() {
    let name = name("found");
    assert!(is_missing(Board::open(&name)));
    let mut board = Board::create(&name, 3).unwrap();
    let reader = Board::open(&name).unwrap();
    assert_eq!(reader.look(), None);
    assert!(board.post(&[1, 2, 3]));
    assert_eq!(reader.look(), Some(vec![1, 2, 3]));
    assert!(!board.post(&[0; 9]), "too long");
    assert_eq!(reader.look(), Some(vec![1, 2, 3]));
    drop(board);
    assert!(is_missing(Board::open(&name)));
    assert_eq!(reader.look(), Some(vec![1, 2, 3]), "who has it, has it");
}

#[test]
fn a_dead_makers_board_is_replaced() {
    let name = name("replaced");
    let mut dead = Board::create(&name, 4).unwrap();
    dead.post(&[1]);
    std::mem::forget(dead);
    assert_eq!(Board::open(&name).unwrap().look(), Some(vec![1]));
    let board = Board::create(&name, 8).unwrap();
    assert_eq!(Board::open(&name).unwrap().look(), None);
    drop(board);
    remove(&name).unwrap();
}

#[test]
fn a_reader_never_sees_half_a_posting() {
    let name = name("torn");
    let mut board = Board::create(&name, 64).unwrap();
    let reader = Board::open(&name).unwrap();
    let done = AtomicBool::new(false);
    let (done, reader) = (&done, &Shared(reader));
    std::thread::scope(|scope| {
        scope.spawn(move || {
            let mut seen = 0;
            while !done.load(Ordering::Relaxed) || seen == 0 {
                let Some(bytes) = reader.0.look() else {
                    continue;
                };
                assert!(bytes.iter().all(|&byte| byte == bytes[0]), "{bytes:?}");
                assert_eq!(bytes.len(), usize::from(bytes[0] % 64 + 1));
                seen += 1;
            }
        });
        for number in 0..200_000_u32 {
            let byte = number as u8;
            assert!(board.post(&vec![byte; usize::from(byte % 64 + 1)]));
        }
        done.store(true, Ordering::Relaxed);
    });
}

/// The mapping is used through atomics alone.
struct Shared(Board);
// SAFETY: `Board::look` takes atomics, and another thread's alike.
unsafe impl Sync for Shared {}

// I8: who cuts it short harms nobody.
#[test]
fn a_board_that_is_cut_short_is_survived_by_both_sides() {
    fault::install().unwrap();
    let name = name("cut");
    let mut board = Board::create(&name, 4096).unwrap();
    let reader = Board::open(&name).unwrap();
    assert!(board.post(&[5; 4096]));
    let file = shm_open(name.as_str(), OFlag::O_RDWR, Mode::empty()).unwrap();
    ftruncate(&file, 8).unwrap();
    let _ = reader.look();
    assert!(board.post(&[6; 4096]));
    assert!(matches!(
        Board::open(&name),
        Err(SegmentError::Initialising)
    ));
}
