//! The bytes of a segment, as any version with this layout writes them, and what
//! opening says of others. A golden test that fails here asks for a new
//! `LAYOUT_VERSION`: see `src/layout.rs`.
#![cfg(all(not(loom), target_endian = "little"))]
#![allow(clippy::unwrap_used)]

use proptest::prelude::*;
use ringmain_ring::Ordering;
use ringmain_ring::layout::{Geometry, HEADER_BYTES, LAYOUT_VERSION, RING_BYTES_MAX};
use ringmain_ring::record_ring::{Reader, Writer};
use ringmain_ring::segment::{SegmentError, create};
use ringmain_ring::session::SessionMap;
use ringmain_ring::wait::{broker, client};
use std::fs::{File, OpenOptions};
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::{Path, PathBuf};
use tempfile::TempDir;

const GEOMETRY: Geometry = Geometry {
    submission_bytes: 8192,
    delivery_bytes: 4096,
    answer_bytes: 4096,
};
const SEGMENT_BYTES: usize = 4096 + 8192 + 4096 + 4096;

fn fresh() -> (TempDir, PathBuf, File, SessionMap) {
    let folder = tempfile::tempdir_in("/dev/shm").unwrap();
    let path = folder.path().join("session");
    let file = create(&path, GEOMETRY.segment_bytes() as u64).unwrap();
    let map = SessionMap::initialise(&file, &path, GEOMETRY, 0x1122_3344_5566_7788, 0x2a).unwrap();
    (folder, path, file, map)
}

fn open(path: &Path) -> Result<SessionMap, SegmentError> {
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .open(path)
        .unwrap();
    SessionMap::open(&file, path)
}

/// The segment's bytes that are not zero, in runs.
fn written(path: &Path) -> Vec<(usize, Vec<u8>)> {
    let bytes = std::fs::read(path).unwrap();
    assert_eq!(bytes.len(), SEGMENT_BYTES);
    let mut runs: Vec<(usize, Vec<u8>)> = Vec::new();
    for (at, word) in bytes.chunks(8).enumerate() {
        if word == [0; 8] {
            continue;
        }
        match runs.last_mut() {
            Some((start, run)) if *start + run.len() == at * 8 => run.extend(word),
            _ => runs.push((at * 8, word.to_vec())),
        }
    }
    runs
}

#[rustfmt::skip]
const PREAMBLE: [u8; 48] = [
    // magic
    b'R', b'I', b'N', b'G', b'M', b'A', b'I', b'N',
    // layout version, header bytes
    2, 0, 0, 0,  0x00, 0x10, 0, 0,
    // instance
    0x88, 0x77, 0x66, 0x55, 0x44, 0x33, 0x22, 0x11,
    // session
    0x2a, 0, 0, 0, 0, 0, 0, 0,
    // submission, delivery, answer ring; attachments
    0x00, 0x20, 0, 0,  0x00, 0x10, 0, 0,  0x00, 0x10, 0, 0,  0x00, 0x02, 0, 0,
];

#[test]
fn a_fresh_segment_has_these_bytes_and_is_otherwise_zero() {
    let (_folder, path, file, _map) = fresh();
    let expected = vec![
        (0, PREAMBLE.to_vec()),
        // final position: none yet
        (912, vec![0xff; 8]),
    ];
    assert_eq!(written(&path), expected);
    let mode = file.metadata().unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600, "its owner's alone");
}

#[test]
fn cursors_and_words_lie_where_the_layout_says() {
    let (_folder, path, _file, map) = fresh();
    let header = map.header();
    let cursors = [
        (128, &map.submission().tail, &header.submission_tail.word),
        (256, &map.submission().head, &header.submission_head.word),
        (384, &map.delivery().tail, &header.delivery_tail.word),
        (512, &map.delivery().head, &header.delivery_head.word),
        (640, &map.answers().tail, &header.answer_tail.word),
        (768, &map.answers().head, &header.answer_head.word),
    ];
    let mut expected = vec![(0, PREAMBLE.to_vec())];
    for (at, of_ring, of_header) in cursors {
        assert!(std::ptr::eq(*of_ring, of_header));
        of_ring.store(at, Ordering::Relaxed);
        expected.push((at as usize, at.to_le_bytes().to_vec()));
    }
    header.confirmations.stored.store(1, Ordering::Relaxed);
    header.confirmations.synced.store(2, Ordering::Relaxed);
    header
        .confirmations
        .final_position
        .store(3, Ordering::Relaxed);
    let numbers = [1_u64, 2, 3].iter().flat_map(|n| n.to_le_bytes());
    expected.push((896, numbers.collect()));
    // A wait word: bits below, the count of wakes from bit 8 upwards.
    map.broker_wait().set(broker::CLOSING);
    map.broker_wait().announce(broker::ROOM);
    expected.push((1024, vec![0x06, 0, 0, 0, 0, 0, 0, 0]));
    map.client_wait().announce(client::MESSAGES | client::LIMIT);
    map.client_wait().take(client::MESSAGES);
    expected.push((1152, vec![0x10, 0x01, 0, 0, 0, 0, 0, 0]));
    map.attachment(0).unwrap().store(1, Ordering::Relaxed);
    map.attachment(511).unwrap().store(4, Ordering::Relaxed);
    assert!(map.attachment(512).is_none());
    expected.push((2048, vec![1, 0, 0, 0, 0, 0, 0, 0]));
    expected.push((4088, vec![0, 0, 0, 0, 4, 0, 0, 0]));
    assert_eq!(written(&path), expected);
}

#[test]
fn records_lie_in_their_ring_with_these_bytes() {
    let (_folder, path, _file, map) = fresh();
    let mut writer = Writer::new(0, 0);
    let ring = map.submission();
    let slot = writer.begin(ring, 0x21, 0x8003, 13).unwrap().unwrap();
    slot.put_u64(0, 0x0807_0605_0403_0201);
    slot.put_bytes(8, b"hello");
    writer.begin(ring, 0xff, 0, 0).unwrap().unwrap();
    writer.publish(ring);
    map.answers().area.store(0, 0xaa);
    map.delivery().area.store(0, 0xdd);
    #[rustfmt::skip]
    let records = vec![
        // length, kind, flags, nothing
        13, 0, 0, 0,  0x21,  0x03, 0x80,  0,
        1, 2, 3, 4, 5, 6, 7, 8,
        b'h', b'e', b'l', b'l', b'o', 0, 0, 0,
        // a record without content
        0, 0, 0, 0,  0xff,  0, 0,  0,
    ];
    let expected = vec![
        (0, PREAMBLE.to_vec()),
        (128, vec![32, 0, 0, 0, 0, 0, 0, 0]),
        (912, vec![0xff; 8]),
        (4096, records),
        (4096 + 8192, vec![0xdd, 0, 0, 0, 0, 0, 0, 0]),
        (4096 + 8192 + 4096, vec![0xaa, 0, 0, 0, 0, 0, 0, 0]),
    ];
    assert_eq!(written(&path), expected);
}

#[test]
fn a_wrapped_record_is_preceded_by_padding_with_these_bytes() {
    let (_folder, path, _file, map) = fresh();
    let ring = map.delivery();
    let mut writer = Writer::new(4096 - 24, 4096 - 24);
    let slot = writer.begin(ring, 7, 0, 24).unwrap().unwrap();
    slot.put_bytes(0, &[0x77; 24]);
    let mut record = vec![24, 0, 0, 0, 7, 0, 0, 0];
    record.extend([0x77; 24]);
    let expected = vec![
        (0, PREAMBLE.to_vec()),
        (912, vec![0xff; 8]),
        (4096 + 8192, record),
        // kind 0: fills 8 + 16 bytes
        (4096 + 8192 + 4096 - 24, vec![16, 0, 0, 0, 0, 0, 0, 0]),
    ];
    assert_eq!(written(&path), expected);
}

#[test]
fn what_one_mapping_writes_another_reads() {
    let (_folder, path, _file, map) = fresh();
    let other = open(&path).unwrap();
    assert_eq!(other.geometry(), GEOMETRY);
    assert_eq!(
        (other.instance(), other.session()),
        (0x1122_3344_5566_7788, 0x2a)
    );
    let (mut writer, mut reader) = (Writer::new(0, 0), Reader::new(0, 0));
    let slot = writer.begin(map.answers(), 1, 0, 3).unwrap().unwrap();
    slot.put_bytes(0, b"yes");
    writer.publish(map.answers());
    let record = reader.next(other.answers()).unwrap().unwrap();
    let mut content = [0; 3];
    other
        .answers()
        .area
        .copy_out(record.offset as usize, &mut content);
    assert_eq!(&content, b"yes");
}

/// What opening says of a fresh segment after `change`.
fn opened_after(change: impl FnOnce(&File)) -> SegmentError {
    let (_folder, path, file, map) = fresh();
    drop(map);
    change(&file);
    open(&path).expect_err("opened")
}

fn write_at(file: &File, at: u64, bytes: &[u8]) {
    file.write_all_at(bytes, at).unwrap();
}

// I10: a maker that dies at any point leaves what is told from a segment and
// from a broken one.
#[test]
fn a_segment_whose_maker_died_is_initialising() {
    let version_missing = opened_after(|file| write_at(file, 8, &[0; 4]));
    assert!(matches!(version_missing, SegmentError::Initialising));
    let zeroes = opened_after(|file| write_at(file, 0, &[0; 4096]));
    assert!(matches!(zeroes, SegmentError::Initialising));
    // Between making the file and reserving its memory.
    let empty = opened_after(|file| file.set_len(0).unwrap());
    assert!(matches!(empty, SegmentError::Initialising));
}

#[test]
fn a_segment_of_another_version_is_refused_with_both_versions() {
    for version in [LAYOUT_VERSION + 1, u32::MAX] {
        let error = opened_after(|file| write_at(file, 8, &version.to_le_bytes()));
        let SegmentError::Version { found, known } = error else {
            panic!("{error}");
        };
        assert_eq!((found, known), (version, LAYOUT_VERSION));
        let said = error.to_string();
        assert!(said.contains(&format!("layout {version}")), "{said}");
    }
}

// I8: the geometry in the header is input.
#[test]
fn a_corrupt_header_is_refused() {
    let corrupt = |at, bytes: &[u8]| {
        let error = opened_after(|file| write_at(file, at, bytes));
        assert!(matches!(error, SegmentError::Corrupt(_)), "{at}: {error}");
    };
    corrupt(0, b"ringmain");
    corrupt(12, &0_u32.to_le_bytes());
    corrupt(44, &513_u32.to_le_bytes());
    for ring in [32, 36, 40] {
        for bytes in [0, 1, 2048, 4095, 4097, 12288, 2 * RING_BYTES_MAX, u32::MAX] {
            corrupt(ring, &bytes.to_le_bytes());
        }
    }
}

// I8: no SIGBUS from a file that is shorter than its header says.
#[test]
fn a_short_segment_is_refused() {
    for bytes in [1, HEADER_BYTES - 1, HEADER_BYTES, SEGMENT_BYTES - 1] {
        let error = opened_after(|file| file.set_len(bytes as u64).unwrap());
        let SegmentError::Corrupt(why) = error else {
            panic!("{bytes}: {error}");
        };
        assert!(why.contains("shorter"), "{why}");
    }
    let claims_more = opened_after(|file| write_at(file, 40, &8192_u32.to_le_bytes()));
    assert!(matches!(claims_more, SegmentError::Corrupt(_)));
}

// I8: a successor of the broker believes its ledger, and no header that a client
// could write.
#[test]
fn an_adopted_segment_has_the_geometry_that_its_broker_knows() {
    let (_folder, path, file, map) = fresh();
    drop(map);
    write_at(&file, 0, &[0xff; 128]);
    let map = SessionMap::adopt(&file, &path, GEOMETRY, 3, 4).unwrap();
    assert_eq!(
        (map.geometry(), map.instance(), map.session()),
        (GEOMETRY, 3, 4)
    );

    let larger = Geometry {
        answer_bytes: 8192,
        ..GEOMETRY
    };
    let impossible = Geometry {
        answer_bytes: 4097,
        ..GEOMETRY
    };
    for geometry in [larger, impossible] {
        let adopted = SessionMap::adopt(&file, &path, geometry, 3, 4);
        assert!(matches!(adopted, Err(SegmentError::Corrupt(_))));
    }
}

#[test]
fn an_absent_segment_is_said_to_be_absent() {
    let (folder, _path, _file, _map) = fresh();
    let absent = File::open(folder.path().join("other")).unwrap_err();
    assert_eq!(absent.kind(), std::io::ErrorKind::NotFound);
}

#[test]
fn a_segment_is_not_initialised_with_impossible_rings() {
    let (_folder, path, file, _map) = fresh();
    for bytes in [0, 2048, 5000, 2 * RING_BYTES_MAX] {
        let geometry = Geometry {
            answer_bytes: bytes,
            ..GEOMETRY
        };
        assert!(SessionMap::initialise(&file, &path, geometry, 1, 1).is_err());
    }
    let too_large = Geometry {
        answer_bytes: 8192,
        ..GEOMETRY
    };
    assert!(SessionMap::initialise(&file, &path, too_large, 1, 1).is_err());
}

proptest! {
    // I8: whatever the first page says, opening ends; and what it opens lies
    // within the file.
    #[test]
    fn any_header_is_opened_or_refused(
        bytes in prop::collection::vec(any::<u8>(), 48),
        kept in prop::collection::vec(any::<bool>(), 12),
        rings in prop::collection::vec(10_u32..16, 3),
    ) {
        let (_folder, path, file, map) = fresh();
        drop(map);
        for (at, kept) in kept.iter().enumerate() {
            if !kept {
                write_at(&file, at as u64 * 4, &bytes[at * 4..at * 4 + 4]);
            }
        }
        for (ring, power) in rings.iter().enumerate() {
            let size = 1_u32 << power;
            write_at(&file, 32 + ring as u64 * 4, &size.to_le_bytes());
        }
        if let Ok(map) = open(&path) {
            prop_assert!(map.geometry().segment_bytes() <= SEGMENT_BYTES);
            let last = map.answers();
            prop_assert_eq!(last.area.load(last.area.size() - 8), 0);
        }
    }
}
