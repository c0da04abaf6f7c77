//! The record ring against a model, and against bytes that no correct program
//! writes. Memory ordering is in `tests/loom_ring.rs`, real processes are in
//! `tests/process_death.rs`.
#![allow(clippy::unwrap_used)]

use super::*;
use proptest::prelude::*;
use std::collections::VecDeque;

/// A word that no test writes, around every ring.
const GUARD: u64 = 0x6775_6172_6467_7561;
const GUARDS: usize = 8;

/// A ring on the heap, between guards.
struct Memory {
    tail: AtomicU64,
    head: AtomicU64,
    words: Vec<AtomicU64>,
}

impl Memory {
    fn new(bytes: usize, position: u64) -> Memory {
        let ring = (0..bytes / 8).map(|_| 0);
        let guard = [GUARD; GUARDS];
        let words = guard.into_iter().chain(ring).chain(guard);
        Memory {
            tail: AtomicU64::new(position),
            head: AtomicU64::new(position),
            words: words.map(AtomicU64::new).collect(),
        }
    }

    fn ring(&self) -> Ring<'_> {
        let inner = &self.words[GUARDS..self.words.len() - GUARDS];
        Ring {
            tail: &self.tail,
            head: &self.head,
            // SAFETY: words are aligned to 8 and live as long as `self`; being
            // atomics, they may be written through a shared reference.
            area: unsafe { Area::new(inner.as_ptr().cast_mut().cast(), inner.len() * 8) },
        }
    }

    fn check_guards(&self) {
        let (before, after) = (
            &self.words[..GUARDS],
            &self.words[self.words.len() - GUARDS..],
        );
        for word in before.iter().chain(after) {
            assert_eq!(
                word.load(Ordering::Relaxed),
                GUARD,
                "written outside of the ring"
            );
        }
    }
}

/// Content that tells one record, and one byte of it, from another.
fn content(seed: u64, len: usize) -> Vec<u8> {
    (0..len as u64)
        .map(|at| {
            (seed
                .wrapping_mul(0x9e37_79b9_7f4a_7c15)
                .rotate_left(at as u32)
                ^ at) as u8
        })
        .collect()
}

fn content_of(ring: Ring<'_>, record: &Record) -> Vec<u8> {
    let mut copied = vec![0; record.len as usize];
    ring.area.copy_out(record.offset as usize, &mut copied);
    let mut appended = vec![0xaa];
    ring.area
        .append_to(record.offset as usize, record.len as usize, &mut appended);
    assert_eq!(copied, appended[1..]);
    copied
}

fn write(writer: &mut Writer, ring: Ring<'_>, bytes: &[u8]) -> u64 {
    let slot = writer.begin(ring, 1, 2, bytes.len()).unwrap().unwrap();
    slot.put_bytes(0, bytes);
    slot.position
}

/// Bytes that a record takes from `position`, padding included: the rule again,
/// in other words than the ring's.
fn bytes_needed(size: u64, position: u64, content: u64) -> u64 {
    let record = 8 + content.div_ceil(8) * 8;
    let left = size - position % size;
    if record <= left {
        record
    } else {
        left + record
    }
}

// I1, at every offset of the ring, for every content size there is.
#[test]
fn every_content_comes_through_from_every_offset_or_never_fits() {
    const SIZE: usize = 256;
    for lap in [0, SIZE as u64, 1 << 62] {
        for offset in (0..SIZE as u64).step_by(8) {
            for len in 0..=SIZE + 16 {
                let position = lap + offset;
                let memory = Memory::new(SIZE, position);
                let ring = memory.ring();
                let mut writer = Writer::new(position, position);
                let mut reader = Reader::new(position, position);
                let needed = bytes_needed(SIZE as u64, offset, len as u64);
                let fits = needed <= SIZE as u64;
                assert!(
                    fits || record_bytes(len) > SIZE / 2,
                    "half a ring always fits"
                );
                assert_eq!(writer.fits(ring, len), Ok(fits), "{len} bytes at {offset}");
                let slot = writer.begin(ring, 7, 0xfffe, len).unwrap();
                assert_eq!(slot.is_ok(), fits);
                assert_eq!(reader.next(ring), Ok(None), "not published yet");
                if let Ok(slot) = slot {
                    slot.put_bytes(0, &content(position, len));
                    writer.publish(ring);
                    assert_eq!(writer.used(), needed);
                    let record = reader.next(ring).unwrap().unwrap();
                    assert_eq!((record.kind, record.flags), (7, 0xfffe));
                    assert_eq!(record.position, slot.position);
                    assert_eq!(record.end(), position + needed);
                    assert_eq!(content_of(ring, &record), content(position, len));
                    reader.free(ring, record.end());
                    assert_eq!(writer.refresh(ring), Ok(0));
                }
                assert_eq!(reader.next(ring), Ok(None));
                memory.check_guards();
            }
        }
    }
}

#[test]
fn a_content_of_absurd_length_does_not_fit() {
    let memory = Memory::new(64, 40);
    let mut writer = Writer::new(40, 40);
    for len in [
        65,
        u32::MAX as usize,
        1 << 32,
        usize::MAX - 8,
        usize::MAX - 7,
        usize::MAX,
    ] {
        assert_eq!(writer.fits(memory.ring(), len), Ok(false));
        assert_eq!(
            writer.begin(memory.ring(), 1, 0, len).unwrap().err(),
            Some(Full)
        );
    }
    assert!(!writer.has_unpublished());
}

// I1: nothing of a record is seen before its publish, nor the padding before it.
#[test]
fn publishing_up_to_a_wrapped_record_is_not_damage() {
    let memory = Memory::new(64, 32);
    let ring = memory.ring();
    let mut writer = Writer::new(32, 32);
    let mut reader = Reader::new(32, 32);
    write(&mut writer, ring, &[1; 8]);
    let wrapped = write(&mut writer, ring, &[2; 16]);
    assert_eq!(wrapped, 64, "after 16 bytes of padding");
    writer.publish_to(ring, wrapped);
    assert_eq!(
        content_of(ring, &reader.next(ring).unwrap().unwrap()),
        [1; 8]
    );
    assert_eq!(reader.next(ring), Ok(None));
    assert_eq!(reader.next(ring), Ok(None));
    writer.publish(ring);
    assert_eq!(
        content_of(ring, &reader.next(ring).unwrap().unwrap()),
        [2; 16]
    );
    assert_eq!(reader.next(ring), Ok(None));
}

#[test]
fn a_discarded_record_leaves_its_room() {
    let memory = Memory::new(64, 32);
    let ring = memory.ring();
    let mut writer = Writer::new(32, 32);
    write(&mut writer, ring, &[1; 8]);
    writer.publish(ring);
    write(&mut writer, ring, &[2; 24]);
    assert!(writer.has_unpublished());
    writer.discard();
    assert!(!writer.has_unpublished());
    assert_eq!(write(&mut writer, ring, &[3; 8]), 48);
    writer.publish(ring);
    let mut reader = Reader::new(32, 32);
    assert_eq!(
        content_of(ring, &reader.next(ring).unwrap().unwrap()),
        [1; 8]
    );
    assert_eq!(
        content_of(ring, &reader.next(ring).unwrap().unwrap()),
        [3; 8]
    );
}

// A delivery goes from ring to ring without a stop in private memory.
#[test]
fn a_content_can_be_copied_from_ring_to_ring() {
    let (from, to) = (Memory::new(64, 0), Memory::new(128, 120));
    let (mut writer, mut reader) = (Writer::new(0, 0), Reader::new(0, 0));
    write(&mut writer, from.ring(), &content(1, 21));
    writer.publish(from.ring());
    let record = reader.next(from.ring()).unwrap().unwrap();

    let (mut writer, mut reader) = (Writer::new(120, 120), Reader::new(120, 120));
    let slot = writer
        .begin(to.ring(), 9, 0, 8 + record.len as usize)
        .unwrap()
        .unwrap();
    slot.put_u64(0, 77);
    let (area, offset) = slot.target();
    from.ring().area.copy_across(
        record.offset as usize,
        area,
        offset + 8,
        record.len as usize,
    );
    writer.publish(to.ring());
    let copy = reader.next(to.ring()).unwrap().unwrap();
    let copied = content_of(to.ring(), &copy);
    assert_eq!(copied[..8], 77_u64.to_ne_bytes());
    assert_eq!(copied[8..], content(1, 21));
}

/// What a writer and a reader do, in any order. Numbers choose among what is
/// possible at that moment.
#[derive(Debug, Clone)]
enum Step {
    Write {
        len: usize,
    },
    Publish,
    PublishSome(usize),
    Discard,
    Read,
    Free(usize),
    /// The writer dies; a successor goes on at `tail`.
    WriterDies,
    /// The reader dies; a successor goes on at `head`.
    ReaderDies,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        8 => (0_usize..80).prop_map(|len| Step::Write { len }),
        2 => (0_usize..600).prop_map(|len| Step::Write { len }),
        5 => Just(Step::Publish),
        2 => any::<usize>().prop_map(Step::PublishSome),
        1 => Just(Step::Discard),
        8 => Just(Step::Read),
        5 => any::<usize>().prop_map(Step::Free),
        1 => Just(Step::WriterDies),
        1 => Just(Step::ReaderDies),
    ];
    prop::collection::vec(step, 1..200)
}

#[derive(Debug, Clone, PartialEq)]
struct Written {
    position: u64,
    end: u64,
    content: Vec<u8>,
}

/// The ring as everybody would write it without shared memory.
struct Model {
    size: u64,
    next: u64,
    head: u64,
    unpublished: VecDeque<Written>,
    published: VecDeque<Written>,
    read: VecDeque<Written>,
}

impl Model {
    fn tail(&self) -> u64 {
        let last = self.published.back().or(self.read.back());
        last.map_or(self.head, |record| record.end)
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    // I1, I2, I10: what was published is read, in order and whole, and read
    // again if the reader dies before it frees it; room is refused exactly when
    // there is none.
    #[test]
    fn the_ring_is_a_queue(
        size in (6_u32..10).prop_map(|power| 1_usize << power),
        start in prop_oneof![0_u64..1024, (1_u64 << 62)..(1 << 62) + 1024],
        steps in steps(),
    ) {
        let start = start & !7;
        let memory = Memory::new(size, start);
        let ring = memory.ring();
        let mut writer = Writer::new(start, start);
        let mut reader = Reader::new(start, start);
        let mut model = Model {
            size: size as u64,
            next: start,
            head: start,
            unpublished: VecDeque::new(),
            published: VecDeque::new(),
            read: VecDeque::new(),
        };
        let mut seed = 0;
        for step in steps {
            match step {
                Step::Write { len } => {
                    let needed = bytes_needed(model.size, model.next, len as u64);
                    let fits = model.next + needed - model.head <= model.size;
                    seed += 1;
                    match writer.begin(ring, 1, 2, len).unwrap() {
                        Err(Full) => prop_assert!(!fits, "refused {len} bytes"),
                        Ok(slot) => {
                            prop_assert!(fits, "took {len} bytes");
                            slot.put_bytes(0, &content(seed, len));
                            let end = model.next + needed;
                            let position = end - record_bytes(len) as u64;
                            prop_assert_eq!(slot.position, position);
                            model.next = end;
                            let content = content(seed, len);
                            model.unpublished.push_back(Written { position, end, content });
                        }
                    }
                    prop_assert_eq!(writer.next_position(), model.next);
                }
                Step::Publish => {
                    writer.publish(ring);
                    model.published.append(&mut model.unpublished);
                }
                Step::PublishSome(count) => {
                    let count = count % (model.unpublished.len() + 1);
                    model.published.extend(model.unpublished.drain(..count));
                    writer.publish_to(ring, model.tail());
                }
                Step::Discard => {
                    writer.discard();
                    model.unpublished.clear();
                    model.next = model.tail();
                }
                Step::Read => {
                    let record = reader.next(ring).unwrap();
                    let expected = model.published.pop_front();
                    prop_assert_eq!(record.is_some(), expected.is_some());
                    if let (Some(record), Some(expected)) = (record, expected) {
                        prop_assert_eq!((record.kind, record.flags), (1, 2));
                        prop_assert_eq!(record.position, expected.position);
                        prop_assert_eq!(record.end(), expected.end);
                        prop_assert_eq!(reader.next_position(), expected.end);
                        prop_assert_eq!(content_of(ring, &record), expected.content.clone());
                        model.read.push_back(expected);
                    }
                }
                Step::Free(count) => {
                    let count = count % (model.read.len() + 1);
                    if let Some(last) = model.read.drain(..count).next_back() {
                        model.head = last.end;
                        reader.free(ring, last.end);
                    }
                    prop_assert_eq!(reader.freed(), model.head);
                }
                Step::WriterDies => {
                    let tail = memory.tail.load(Ordering::Acquire);
                    writer = Writer::resume(ring, tail).unwrap();
                    model.unpublished.clear();
                    model.next = model.tail();
                    prop_assert_eq!(writer.next_position(), model.next);
                }
                Step::ReaderDies => {
                    let head = memory.head.load(Ordering::Acquire);
                    prop_assert_eq!(head, model.head);
                    reader = Reader::new(head, head);
                    model.read.append(&mut model.published);
                    std::mem::swap(&mut model.read, &mut model.published);
                }
            }
        }
        memory.check_guards();
    }
}

/// A word as a hostile process may leave it: anything, or nearly a header.
fn hostile_word(size: u64) -> impl Strategy<Value = u64> {
    let length = prop_oneof![
        4 => 0..size as u32 + 16,
        1 => Just(u32::MAX),
        1 => Just(u32::MAX - 7),
        1 => any::<u32>(),
        // To the ring's end, from somewhere: the length of a padding.
        4 => (0..size as u32 / 8).prop_map(|words| words * 8),
    ];
    prop_oneof![
        1 => any::<u64>(),
        3 => (0_u8..3, length).prop_map(|(kind, length)| pack(kind, 0, length)),
    ]
}

/// A cursor as a hostile process may leave it: near the right one, or far.
fn hostile_cursor(start: u64, size: u64) -> impl Strategy<Value = u64> {
    let near = move |words: u64| start.wrapping_sub(size).wrapping_add(words * 8);
    prop_oneof![
        6 => (0..size / 2).prop_map(near),
        1 => (0..size * 4).prop_map(move |bytes| start.wrapping_add(bytes)),
        1 => any::<u64>(),
        1 => prop::sample::select(vec![
            0, 8, u64::MAX, u64::MAX - 7, 1 << 63, (1 << 63) - 8, start ^ (1 << 40),
        ]),
    ]
}

#[derive(Debug, Clone)]
enum Attack {
    Cursor(u64),
    Word(usize, u64),
    Go,
    Free,
}

#[derive(Debug, Clone)]
struct Hostile {
    size: usize,
    start: u64,
    words: Vec<u64>,
    steps: Vec<Attack>,
}

fn hostile() -> impl Strategy<Value = Hostile> {
    let size = (6_u32..9).prop_map(|power| 1_usize << power);
    let start = prop_oneof![0_u64..64, (1_u64 << 62)..(1 << 62) + 64];
    (size, start.prop_map(|words| words & !7)).prop_flat_map(|(size, start)| {
        let step = prop_oneof![
            2 => hostile_cursor(start, size as u64).prop_map(Attack::Cursor),
            1 => (0..size / 8, hostile_word(size as u64)).prop_map(|(at, word)| Attack::Word(at, word)),
            4 => Just(Attack::Go),
            1 => Just(Attack::Free),
        ];
        let words = prop::collection::vec(hostile_word(size as u64), size / 8);
        (words, prop::collection::vec(step, 1..60)).prop_map(move |(words, steps)| Hostile {
            size,
            start,
            words,
            steps,
        })
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(20_000))]

    // I8: whatever lies in the ring and its `tail`, a read ends, with an error or
    // a record that lies within the ring and what was published.
    #[test]
    fn a_reader_survives_any_bytes(hostile in hostile()) {
        let memory = Memory::new(hostile.size, hostile.start);
        let ring = memory.ring();
        for (at, word) in hostile.words.iter().enumerate() {
            ring.area.store(at * 8, *word);
        }
        let mut reader = Reader::new(hostile.start, hostile.start);
        let mut tail_highest = hostile.start;
        for step in hostile.steps {
            match step {
                Attack::Cursor(tail) => {
                    memory.tail.store(tail, Ordering::Relaxed);
                    tail_highest = tail_highest.max(tail);
                }
                Attack::Word(at, word) => ring.area.store(at * 8, word),
                Attack::Free => {
                    let position = reader.next_position();
                    reader.free(ring, position);
                }
                // As long as there are records: bounded, as each is of 8 bytes
                // or more and none is freed.
                Attack::Go => for turn in 0.. {
                    prop_assert!(turn <= hostile.size / 8, "more records than the ring holds");
                    let before = reader.next_position();
                    let Ok(Some(record)) = reader.next(ring) else { break };
                    prop_assert!(record.kind != PADDING);
                    prop_assert!(record.position >= before);
                    prop_assert_eq!(record.end(), reader.next_position());
                    prop_assert!(record.end() <= tail_highest);
                    prop_assert!(record.end() - reader.freed() <= hostile.size as u64);
                    prop_assert!(record.offset as usize + record.len as usize <= hostile.size);
                    content_of(ring, &record);
                },
            }
        }
        memory.check_guards();
    }

    // I8: whatever lies in `head`, a write ends, within the ring.
    #[test]
    fn a_writer_survives_any_head(hostile in hostile(), lens in prop::collection::vec(0_usize..300, 60)) {
        let memory = Memory::new(hostile.size, hostile.start);
        let ring = memory.ring();
        let mut writer = Writer::new(hostile.start, hostile.start);
        for (step, len) in hostile.steps.into_iter().zip(lens) {
            match step {
                Attack::Cursor(head) => {
                    memory.head.store(head, Ordering::Relaxed);
                    if let Ok(resumed) = Writer::resume(ring, writer.next_position()) {
                        prop_assert!(resumed.used() <= hostile.size as u64);
                    }
                }
                Attack::Word(at, word) => ring.area.store(at * 8, word),
                Attack::Free => writer.publish(ring),
                Attack::Go => if let Ok(Ok(slot)) = writer.begin(ring, 1, 0, len) {
                    slot.put_bytes(0, &content(1, len));
                    prop_assert!(writer.used() <= hostile.size as u64);
                },
            }
        }
        memory.check_guards();
    }
}

/// What a reader at 64 of an empty ring of 64 bytes makes of a `tail` and words.
fn read_of(tail: u64, words: &[u64]) -> Result<Option<Record>, Damaged> {
    let memory = Memory::new(64, 64);
    for (at, word) in words.iter().enumerate() {
        memory.ring().area.store(at * 8, *word);
    }
    memory.tail.store(tail, Ordering::Relaxed);
    Reader::new(64, 64).next(memory.ring())
}

// I8.
#[test]
fn an_impossible_tail_is_damage() {
    let cursor = |found| {
        Err(Damaged::Cursor {
            found,
            low: 64,
            high: 128,
        })
    };
    for tail in [0, 56, 63, 65, 68, 129, 136, 1 << 63, u64::MAX, u64::MAX - 7] {
        assert_eq!(
            read_of(tail, &[pack(1, 0, 0); 8]),
            cursor(tail),
            "tail {tail}"
        );
    }
    assert_eq!(read_of(64, &[pack(1, 0, 0); 8]), Ok(None));
    for tail in [72, 128] {
        assert!(read_of(tail, &[pack(1, 0, 0); 8]).unwrap().is_some());
    }
}

// I8: not even over records that were published and not read yet.
#[test]
fn a_tail_that_runs_backwards_is_damage() {
    let memory = Memory::new(64, 0);
    let mut reader = Reader::new(0, 0);
    memory.tail.store(32, Ordering::Relaxed);
    assert_eq!(reader.refresh(memory.ring()), Ok(true));
    memory.tail.store(24, Ordering::Relaxed);
    let damaged = Damaged::Cursor {
        found: 24,
        low: 32,
        high: 64,
    };
    assert_eq!(reader.refresh(memory.ring()), Err(damaged));
}

// I8.
#[test]
fn a_record_beyond_what_is_published_is_damage() {
    for length in [9, 16, 17, 56, 57, 64, u32::MAX - 15, u32::MAX - 7, u32::MAX] {
        let damaged = Err(Damaged::Record {
            position: 64,
            length,
            available: 8,
        });
        assert_eq!(read_of(80, &[pack(1, 0, length)]), damaged);
        assert_eq!(read_of(80, &[pack(PADDING, 0, length)]), damaged);
    }
    for length in 0..=8 {
        assert_eq!(
            read_of(80, &[pack(1, 0, length)]).unwrap().unwrap().len,
            length
        );
    }
}

// I8.
#[test]
fn a_record_across_the_rings_end_is_damage() {
    let memory = Memory::new(64, 32);
    memory.tail.store(96, Ordering::Relaxed);
    memory.ring().area.store(32, pack(1, 0, 32));
    let damaged = Damaged::Record {
        position: 32,
        length: 32,
        available: 56,
    };
    assert_eq!(Reader::new(32, 32).next(memory.ring()), Err(damaged));
}

// I8.
#[test]
fn padding_inside_the_ring_or_after_padding_is_damage() {
    let inside = Damaged::Record {
        position: 64,
        length: 8,
        available: 56,
    };
    assert_eq!(
        read_of(128, &[pack(PADDING, 0, 8), 0, pack(1, 0, 8)]),
        Err(inside)
    );

    let memory = Memory::new(64, 56);
    memory.tail.store(120, Ordering::Relaxed);
    memory.ring().area.store(56, pack(PADDING, 0, 0));
    memory.ring().area.store(0, pack(PADDING, 0, 48));
    let twice = Damaged::Record {
        position: 64,
        length: 48,
        available: 48,
    };
    assert_eq!(Reader::new(56, 56).next(memory.ring()), Err(twice));
}

// I8: a head that says more, or less, than it can.
#[test]
fn an_impossible_head_is_damage() {
    let memory = Memory::new(64, 128);
    let ring = memory.ring();
    let mut writer = Writer::new(128, 128);
    write(&mut writer, ring, &[0; 8]);
    writer.publish(ring);
    write(&mut writer, ring, &[0; 8]);
    for found in [0, 120, 132, 152, 160, 1 << 63, u64::MAX - 7, u64::MAX] {
        memory.head.store(found, Ordering::Relaxed);
        let damaged = Damaged::Cursor {
            found,
            low: 128,
            high: 144,
        };
        assert_eq!(writer.refresh(ring), Err(damaged));
        assert_eq!(writer.begin(ring, 1, 0, 32).err(), Some(damaged));
    }
    memory.head.store(144, Ordering::Relaxed);
    assert_eq!(writer.refresh(ring), Ok(16));
}

// I8: a successor of the broker believes no client's head.
#[test]
fn resuming_at_an_impossible_head_is_damage() {
    let memory = Memory::new(64, 0);
    for found in [0, 56, 60, 136, 1 << 63, u64::MAX - 7] {
        memory.head.store(found, Ordering::Relaxed);
        let resumed = Writer::resume(memory.ring(), 128).map(|writer| writer.used());
        assert_eq!(
            resumed,
            Err(Damaged::Cursor {
                found,
                low: 64,
                high: 128
            })
        );
    }
    for (head, used) in [(64, 64), (72, 56), (128, 0)] {
        memory.head.store(head, Ordering::Relaxed);
        let resumed = Writer::resume(memory.ring(), 128).map(|writer| writer.used());
        assert_eq!(resumed, Ok(used));
    }
}
