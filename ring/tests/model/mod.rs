//! What the loom models share: a ring on the heap.

use loom::cell::UnsafeCell;
use loom::thread::yield_now;
use ringmain_ring::AtomicU64;
use ringmain_ring::record_ring::{Reader, Record, Ring, Writer};
use ringmain_ring::view::Area;

/// A ring as loom sees it: each word of the area is watched for races.
pub struct Memory {
    tail: AtomicU64,
    head: AtomicU64,
    words: Vec<UnsafeCell<u64>>,
}

// SAFETY: sharing the cells is what the models examine; loom fails a test in
// which two accesses to one of them race.
unsafe impl Sync for Memory {}
// SAFETY: as for Sync.
unsafe impl Send for Memory {}

impl Memory {
    /// An empty ring of so many bytes, with both cursors at `position`.
    pub fn new(bytes: usize, position: u64) -> Memory {
        Memory {
            tail: AtomicU64::new(position),
            head: AtomicU64::new(position),
            words: (0..bytes / 8).map(|_| UnsafeCell::new(0)).collect(),
        }
    }

    pub fn ring(&self) -> Ring<'_> {
        Ring {
            tail: &self.tail,
            head: &self.head,
            area: Area::new(&self.words),
        }
    }
}

/// Begins a record of one word, which has to fit.
pub fn write(writer: &mut Writer, ring: Ring<'_>, value: u64) {
    let slot = writer.begin(ring, 1, 0, 8).unwrap().unwrap();
    slot.put_u64(0, value);
}

/// The one word of a record.
pub fn value(ring: Ring<'_>, record: &Record) -> u64 {
    assert_eq!((record.kind, record.len), (1, 8));
    ring.area.load(record.offset as usize)
}

/// The next record's word, spinning until there is one.
#[allow(dead_code)]
pub fn read_spinning(reader: &mut Reader, ring: Ring<'_>) -> u64 {
    loop {
        if let Some(record) = reader.next(ring).unwrap() {
            return value(ring, &record);
        }
        yield_now();
    }
}
