//! Making, reserving and mapping segments.
#![cfg(not(loom))]
#![allow(clippy::unwrap_used)]

use nix::sys::signal::Signal;
use nix::sys::statvfs::statvfs;
use nix::sys::wait::{WaitStatus, waitpid};
use nix::unistd::{ForkResult, fork};
use ringmain_ring::layout::Geometry;
use ringmain_ring::segment::{Mapping, SegmentError, create, reserve};
use ringmain_ring::session::SessionMap;
use ringmain_ring::{Ordering, fault};
use std::io::{ErrorKind, Write};
use std::os::unix::fs::MetadataExt;
use std::sync::Barrier;
use tempfile::TempDir;

fn shared_folder() -> TempDir {
    tempfile::tempdir_in("/dev/shm").unwrap()
}

#[test]
fn a_segment_is_not_made_over_another() {
    let folder = shared_folder();
    let path = folder.path().join("session");
    let file = create(&path, 8192).unwrap();
    Mapping::new(&file, &path, 8192).unwrap().words()[9].store(7, Ordering::Relaxed);

    let error = create(&path, 4096).unwrap_err();
    let said = error.to_string();
    let SegmentError::Io { source, .. } = error else {
        panic!("{said}");
    };
    assert_eq!(source.kind(), ErrorKind::AlreadyExists);
    assert!(
        said.contains("cannot create") && said.contains("session"),
        "{said}"
    );

    let words = Mapping::new(&file, &path, 8192).unwrap();
    assert_eq!(
        words.words()[9].load(Ordering::Relaxed),
        7,
        "left as it was"
    );
}

// I7: what is promised is there, and no more.
#[test]
fn a_segments_memory_is_reserved_when_it_is_made() {
    let folder = shared_folder();
    let path = folder.path().join("session");
    let file = create(&path, 1 << 20).unwrap();
    let metadata = file.metadata().unwrap();
    assert_eq!(metadata.len(), 1 << 20);
    assert_eq!(metadata.blocks() * 512, 1 << 20);

    reserve(&file, &path, 1 << 20, 3 << 20).unwrap();
    assert_eq!(file.metadata().unwrap().blocks() * 512, 3 << 20);
}

// I7: a full file system is an error when the segment is made, no SIGBUS later,
// and leaves nothing behind.
#[test]
fn no_space_is_an_error_that_leaves_no_file() {
    let folder = shared_folder();
    if statvfs(folder.path()).unwrap().blocks() == 0 {
        // Not through `eprintln!`, which the harness would swallow.
        let note = b"SKIPPED: /dev/shm has no limit here, so that it can't be full\n";
        std::io::stderr().write_all(note).unwrap();
        return;
    }
    let path = folder.path().join("session");
    let bytes = 1 << 50;
    let error = create(&path, bytes).unwrap_err();
    let said = error.to_string();
    assert!(
        matches!(error, SegmentError::NoSpace { bytes: asked, .. } if asked == bytes),
        "{said}"
    );
    assert!(
        said.contains("no shared memory left") && said.contains("session"),
        "{said}"
    );
    assert!(!path.exists());

    let file = create(&path, 4096).unwrap();
    let grown = reserve(&file, &path, 4096, bytes);
    assert!(matches!(grown, Err(SegmentError::NoSpace { .. })));
    assert_eq!(file.metadata().unwrap().len(), 4096, "as it was");
}

#[test]
fn a_folder_that_is_missing_is_named() {
    let folder = shared_folder();
    let path = folder.path().join("missing/session");
    let said = create(&path, 4096).unwrap_err().to_string();
    assert!(said.contains("missing/session"), "{said}");
}

fn session(folder: &TempDir) -> SessionMap {
    let path = folder.path().join("session");
    let file = create(&path, Geometry::default().segment_bytes() as u64).unwrap();
    SessionMap::initialise(&file, &path, Geometry::default(), 1, 1).unwrap()
}

/// How a forked child ends that does this: to touch memory and signals alone,
/// which is allowed after a fork with other threads about.
fn in_a_child(act: impl FnOnce()) -> WaitStatus {
    // SAFETY: the child does what the caller promises, and exits.
    match unsafe { fork() }.unwrap() {
        ForkResult::Child => {
            act();
            // SAFETY: ends the child, and runs nothing of what it inherited.
            unsafe { libc::_exit(0) }
        }
        ForkResult::Parent { child } => waitpid(child, None).unwrap(),
    }
}

// I6: a forked child can't write into its parent's rings.
#[test]
fn a_forked_child_does_not_have_the_mapping() {
    let folder = shared_folder();
    let map = session(&folder);
    let tail = map.submission().tail;
    let ended = in_a_child(|| {
        // SAFETY: as `in_a_child` asks. The runtime's handler is for stack
        // overflows.
        unsafe { libc::signal(libc::SIGSEGV, libc::SIG_DFL) };
        tail.store(8, Ordering::SeqCst);
    });
    assert!(
        matches!(ended, WaitStatus::Signaled(_, Signal::SIGSEGV, _)),
        "{ended:?}"
    );
    assert_eq!(tail.load(Ordering::SeqCst), 0);
}

// Payloads are nobody's business in a core file.
#[test]
fn a_mapping_is_left_out_of_forks_and_core_dumps() {
    let folder = shared_folder();
    let map = session(&folder);
    let start = format!("{:x}-", std::ptr::from_ref(map.header()).addr());
    let smaps = std::fs::read_to_string("/proc/self/smaps").unwrap();
    let flags = smaps
        .lines()
        .skip_while(|line| !line.starts_with(&start))
        .find_map(|line| line.strip_prefix("VmFlags:"))
        .expect("mapped");
    let flags: Vec<&str> = flags.split_whitespace().collect();
    for flag in ["sh", "dc", "dd"] {
        assert!(flags.contains(&flag), "{flag} of {flags:?}");
    }
}

// I7: the memory goes back with the mapping, the file stays.
#[test]
fn a_dropped_mapping_is_unmapped() {
    let folder = shared_folder();
    let map = session(&folder);
    let start = format!("{:x}-", std::ptr::from_ref(map.header()).addr());
    let mapped = || {
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        let name = folder.path().join("session").display().to_string();
        maps.lines()
            .any(|line| line.starts_with(&start) && line.ends_with(&name))
    };
    assert!(mapped());
    drop(map);
    assert!(!mapped());
    assert!(folder.path().join("session").exists());
}

/// A file of two pages, mapped and watched.
fn watched(folder: &TempDir) -> (std::fs::File, Mapping) {
    let path = folder.path().join("payloads");
    let file = create(&path, 8192).unwrap();
    let mapping = Mapping::new(&file, &path, 8192).unwrap().watched();
    (file, mapping)
}

// I8: who cuts a segment short takes the other side's memory, not its life.
#[test]
fn a_lost_page_of_a_watched_mapping_reads_as_zeroes_and_marks_it() {
    fault::install().unwrap();
    let folder = shared_folder();
    let (file, mapping) = watched(&folder);
    mapping.words()[1].store(1, Ordering::SeqCst);
    mapping.words()[513].store(513, Ordering::SeqCst);
    assert!(!mapping.is_damaged());
    let before = fault::count();

    file.set_len(4096).unwrap();
    assert_eq!(mapping.words()[513].load(Ordering::SeqCst), 0);
    assert!(mapping.is_damaged());
    assert!(fault::count() > before);
    assert_eq!(mapping.words()[1].load(Ordering::SeqCst), 1, "still there");

    mapping.words()[513].store(7, Ordering::SeqCst);
    assert_eq!(mapping.words()[513].load(Ordering::SeqCst), 7, "goes on");
    assert_eq!(file.metadata().unwrap().len(), 4096, "in no file");
}

// I8: nor does it matter how many threads and how many segments.
#[test]
fn pages_are_lost_under_many_threads_at_once() {
    fault::install().unwrap();
    let ready = Barrier::new(4);
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for _ in 0..100 {
                    let folder = shared_folder();
                    let (file, mapping) = watched(&folder);
                    ready.wait();
                    file.set_len(0).unwrap();
                    let sum: u64 = mapping
                        .words()
                        .iter()
                        .map(|w| w.load(Ordering::SeqCst))
                        .sum();
                    assert_eq!(sum, 0);
                    assert!(mapping.is_damaged());
                }
            });
        }
    });
}

// What is not watched is as deadly as ever: a fault is never hidden.
#[test]
fn a_fault_elsewhere_still_kills() {
    fault::install().unwrap();
    let folder = shared_folder();
    let (_watched_file, _watched) = watched(&folder);
    let path = folder.path().join("other");
    let file = create(&path, 4096).unwrap();
    let other = Mapping::new(&file, &path, 4096).unwrap();
    let start = other.words().as_ptr() as *mut libc::c_void;
    // SAFETY: the advice takes the effect of an earlier one back, so that the
    // child has the mapping.
    unsafe { libc::madvise(start, 4096, libc::MADV_DOFORK) };
    file.set_len(0).unwrap();
    let ended = in_a_child(|| {
        let _ = other.words()[0].load(Ordering::SeqCst);
    });
    assert!(
        matches!(ended, WaitStatus::Signaled(_, Signal::SIGBUS, _)),
        "{ended:?}"
    );
}
