//! Blocks: many messages stored as one value.
//!
//! A block is immutable. What happens to its messages later (settled, attempted
//! again) stands in a row beside it, so that the block is written once and
//! deleted once.
//!
//! # Layout, version 1
//!
//! All numbers are little-endian. Offsets count from the start of the block.
//!
//! ```text
//!    0 +-----------+-----------+-----------+-----------+
//!      | magic     | checksum  | version   | count     |   4 x u32
//!   16 +-----------+-----------+-----------+-----------+
//!      | table     | payload   |                           2 x u32
//!   24 +-----------+-----------+
//!      | message 0: optional fields, padded to 8       |
//!      |            payload, padded to 8               |
//!      | message 1 ...                                 |
//! table+-----------------------------------------------+
//!      | entry 0 (40 bytes) | entry 1 | ...            |
//!      +-----------------------------------------------+
//!
//!  entry: 0 session u64    8 position u64   16 sent_at_ms u64
//!        24 start u32     28 payload length u32
//!        32 attempts u16  34 flags u16
//!        36 length of the optional fields u16   38 zero u16
//! ```
//!
//! *checksum* is the CRC-32 of everything behind itself. *table* is the offset
//! of the table, which comes last because the count is known last. *payload* is
//! the sum of the payload lengths. *start* is where the message's optional
//! fields begin. They lie one behind the other, in ascending order of their tags:
//!
//! ```text
//!  field: 0 tag u8   1 length of the value u16   3 value
//!
//!  tag 1, in parts:     0 length of the payload u64
//!  tag 2, dead letter:  0 died_at_ms u64   8 attempts u16   10 reason u8
//!                      11 name of the source queue, to the field's end
//! ```
//!
//! A message *in parts* has the flag 1. Its payload lies beside the block, in
//! values of its own (see [`Store::put_part`]), so that no value and no write is
//! as large as the largest payload. It is the only one in its block, and its
//! payload length in the entry is 0.
//!
//! To add a field that readers may overlook, put it into the optional fields
//! under a new tag: readers skip tags that they don't know. If a reader must not
//! overlook it, give it a flag as well: a block with a flag that is not in
//! `FLAGS_KNOWN` is refused. Any other change takes a new version.
//!
//! [`Store::put_part`]: super::Store::put_part

mod fields;

use self::fields::Fields;
use bytes::Bytes;
use ringmain::control::DeadLetter;
use std::fmt;
use std::ops::Range;

/// At most this many messages are packed in one block.
pub const MESSAGES_MAX: u32 = 1024;
/// A block takes no further message once its payloads have reached this many
/// bytes. A longer message has a block of its own.
pub const BYTES_TARGET: usize = 128 * 1024;
/// The longest payload that a message can have, in bytes.
pub const PAYLOAD_MAX: usize = 1 << 30;
/// Payloads longer than this many bytes lie in parts of this size. The last part
/// may be shorter.
pub const PART_BYTES: usize = 1 << 20;

const MAGIC: u32 = u32::from_le_bytes(*b"RMbk");
const VERSION: u32 = 1;
/// The payload lies in parts. Goes with the field of that name.
const FLAG_PARTS: u16 = 1;
/// Flags of a message that this version understands.
const FLAGS_KNOWN: u16 = FLAG_PARTS;
const HEADER_BYTES: usize = 24;
const ENTRY_BYTES: usize = 40;
/// The checksum covers everything from here on.
const CHECKED_FROM: usize = 8;

/// What is stored of a message beside its payload.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MessageHead {
    /// Number of the session that sent it.
    pub session: u64,
    /// Position of its record in that session's submission ring.
    pub position: u64,
    /// When it was sent, in milliseconds since the Unix epoch.
    pub sent_at_ms: u64,
    /// How often it had been attempted when the block was written.
    pub attempts: u16,
}

/// Why bytes are not a block: a fact about them, to be followed by where they
/// lie.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct BadBlock(&'static str);

/// Messages packed into one value, in order. A clone shares the bytes.
#[derive(Clone)]
pub struct Block {
    bytes: Bytes,
    header: Header,
}

#[derive(Clone, Copy)]
struct Header {
    count: u32,
    table: u32,
    payload: u32,
}

struct Entry {
    head: MessageHead,
    start: usize,
    payload_len: usize,
    flags: u16,
    optional_len: usize,
    zero: u16,
}

impl Block {
    /// Takes bytes that were read back. Everything is checked here, so that the
    /// accessors need not: no bytes whatever make this or them panic.
    pub fn decode(bytes: Bytes) -> Result<Block, BadBlock> {
        let header = Header::decode(&bytes)?;
        if crc32fast::hash(&bytes[CHECKED_FROM..]) != u32_at(&bytes, 4) {
            return Err(BadBlock("its checksum does not match"));
        }
        let block = Block { bytes, header };
        block.check_entries()?;
        Ok(block)
    }

    /// The number of messages in an encoded block and the sum of their payload
    /// lengths, from its header alone.
    pub(super) fn peek(bytes: &[u8]) -> Result<(u32, usize), BadBlock> {
        let header = Header::decode(bytes)?;
        Ok((header.count, header.payload as usize))
    }

    /// How many messages it holds; at least one.
    #[allow(clippy::len_without_is_empty, reason = "a block is never empty")]
    pub fn len(&self) -> u32 {
        self.header.count
    }

    /// What is stored of a message beside its payload.
    ///
    /// # Panics
    ///
    /// Here and in the other accessors, if `index` is not below [`Block::len`].
    pub fn message(&self, index: u32) -> MessageHead {
        self.entry(index).head
    }

    /// A message's payload; empty if it lies in parts.
    pub fn payload(&self, index: u32) -> &[u8] {
        &self.bytes[self.payload_range(index)]
    }

    /// Where a message's payload lies in [`Block::as_bytes`].
    pub fn payload_range(&self, index: u32) -> Range<usize> {
        self.entry(index).payload_range()
    }

    /// A message's payload, shared with the block and not copied. It keeps the
    /// whole block in memory.
    pub fn payload_bytes(&self, index: u32) -> Bytes {
        self.bytes.slice(self.payload_range(index))
    }

    /// The length of a message's payload in bytes, whether it lies in the block
    /// or in parts.
    pub fn payload_len(&self, index: u32) -> usize {
        let entry = self.entry(index);
        match self.fields(&entry).in_parts {
            Some(len) => len as usize,
            None => entry.payload_len,
        }
    }

    /// Whether a message's payload lies in parts. Its [`Block::payload`] is empty
    /// then.
    pub fn is_in_parts(&self, index: u32) -> bool {
        self.entry(index).flags & FLAG_PARTS != 0
    }

    /// What is known of a message's death, if it is a dead letter.
    pub fn letter(&self, index: u32) -> Option<DeadLetter> {
        let entry = self.entry(index);
        self.fields(&entry).letter
    }

    /// The sum of the lengths of the payloads that lie in the block.
    pub fn payload_total(&self) -> usize {
        self.header.payload as usize
    }

    /// The encoded block, as [`Block::decode`] takes it.
    pub fn as_bytes(&self) -> &[u8] {
        &self.bytes
    }

    fn entry(&self, index: u32) -> Entry {
        assert!(
            index < self.header.count,
            "no message {index} in a block of {}",
            self.header.count
        );
        let at = self.header.table as usize + index as usize * ENTRY_BYTES;
        Entry::decode(&self.bytes[at..at + ENTRY_BYTES])
    }

    fn fields(&self, entry: &Entry) -> Fields {
        Fields::decode(&self.bytes[entry.optional_range()])
            .expect("the fields were checked when the block was decoded")
    }

    /// Messages must lie one behind the other from the header to the table, so
    /// that no two share bytes and none reaches outside.
    fn check_entries(&self) -> Result<(), BadBlock> {
        let table = self.header.table as usize;
        let mut start = HEADER_BYTES;
        let mut payload = 0;
        for index in 0..self.header.count {
            let entry = self.entry(index);
            if entry.flags & !FLAGS_KNOWN != 0 || entry.zero != 0 {
                return Err(BadBlock(
                    "a message needs a newer version of ringmain to be read",
                ));
            }
            if entry.start != start {
                return Err(BadBlock("a message is not where it should be"));
            }
            start = entry.end();
            if start > table {
                return Err(BadBlock("a message is longer than its block"));
            }
            self.check_fields(&entry)?;
            payload += entry.payload_len;
        }
        if start != table || payload != self.payload_total() {
            return Err(BadBlock("its messages do not fill it"));
        }
        Ok(())
    }

    fn check_fields(&self, entry: &Entry) -> Result<(), BadBlock> {
        let fields = Fields::decode(&self.bytes[entry.optional_range()])?;
        if fields.in_parts.is_some() != (entry.flags & FLAG_PARTS != 0) {
            return Err(BadBlock("a message in parts lacks its flag or its length"));
        }
        if fields.in_parts.is_some() && (self.header.count != 1 || entry.payload_len != 0) {
            return Err(BadBlock("a message in parts is not alone in its block"));
        }
        Ok(())
    }
}

impl fmt::Debug for Block {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Block")
            .field("len", &self.len())
            .field("payload_total", &self.payload_total())
            .finish_non_exhaustive()
    }
}

impl Header {
    /// Reads the header, and checks all of it but the checksum.
    fn decode(bytes: &[u8]) -> Result<Header, BadBlock> {
        if bytes.len() < HEADER_BYTES {
            return Err(BadBlock("it is shorter than a header"));
        }
        if u32_at(bytes, 0) != MAGIC {
            return Err(BadBlock("it does not begin as one does"));
        }
        if u32_at(bytes, 8) != VERSION {
            return Err(BadBlock("its layout version is unknown"));
        }
        let header = Header {
            count: u32_at(bytes, 12),
            table: u32_at(bytes, 16),
            payload: u32_at(bytes, 20),
        };
        let end = u64::from(header.table) + u64::from(header.count) * ENTRY_BYTES as u64;
        if header.count == 0 || end != bytes.len() as u64 {
            return Err(BadBlock("its length does not match its count"));
        }
        Ok(header)
    }

    fn encode(self) -> [u8; HEADER_BYTES] {
        let mut bytes = [0; HEADER_BYTES];
        bytes[..4].copy_from_slice(&MAGIC.to_le_bytes());
        bytes[8..12].copy_from_slice(&VERSION.to_le_bytes());
        bytes[12..16].copy_from_slice(&self.count.to_le_bytes());
        bytes[16..20].copy_from_slice(&self.table.to_le_bytes());
        bytes[20..].copy_from_slice(&self.payload.to_le_bytes());
        bytes
    }
}

impl Entry {
    fn decode(bytes: &[u8]) -> Entry {
        Entry {
            head: MessageHead {
                session: u64_at(bytes, 0),
                position: u64_at(bytes, 8),
                sent_at_ms: u64_at(bytes, 16),
                attempts: u16_at(bytes, 32),
            },
            start: u32_at(bytes, 24) as usize,
            payload_len: u32_at(bytes, 28) as usize,
            flags: u16_at(bytes, 34),
            optional_len: usize::from(u16_at(bytes, 36)),
            zero: u16_at(bytes, 38),
        }
    }

    fn optional_range(&self) -> Range<usize> {
        self.start..self.start + self.optional_len
    }

    fn payload_range(&self) -> Range<usize> {
        let from = self.start + padded(self.optional_len);
        from..from + self.payload_len
    }

    fn end(&self) -> usize {
        padded(self.payload_range().end)
    }
}

/// Packs messages into a [`Block`].
#[derive(Debug, Default)]
pub struct BlockBuilder {
    /// Room for the header, then the messages.
    bytes: Vec<u8>,
    /// The entries, which go behind the messages at the end.
    table: Vec<u8>,
    count: u32,
    payload: usize,
    /// It holds a message in parts, and takes no other.
    in_parts: bool,
}

impl BlockBuilder {
    /// An empty builder, which grows with what is pushed.
    pub fn new() -> BlockBuilder {
        BlockBuilder::default()
    }

    /// An empty builder with room for this many messages and bytes of payload,
    /// or for a full block if that is less.
    pub fn with_capacity(messages: usize, payload_bytes: usize) -> BlockBuilder {
        let messages = messages.min(MESSAGES_MAX as usize);
        // Padding takes up to 8 bytes a message.
        let payload = payload_bytes.min(BYTES_TARGET) + 8 * messages;
        BlockBuilder {
            bytes: Vec::with_capacity(HEADER_BYTES + payload + messages * ENTRY_BYTES),
            table: Vec::with_capacity(messages * ENTRY_BYTES),
            ..BlockBuilder::default()
        }
    }

    /// How many messages it holds.
    pub fn len(&self) -> u32 {
        self.count
    }

    /// Whether it holds no message yet.
    pub fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// The sum of the lengths of the payloads that lie in the block.
    pub fn payload_total(&self) -> usize {
        self.payload
    }

    /// Whether it holds as much as a block should.
    pub fn is_full(&self) -> bool {
        self.count >= MESSAGES_MAX || self.payload >= BYTES_TARGET || self.in_parts
    }

    /// Whether a payload of this length belongs in the same block: it is not
    /// full, and a payload beyond [`BYTES_TARGET`] wants a block of its own.
    pub fn takes(&self, payload_len: usize) -> bool {
        self.is_empty() || !self.is_full() && payload_len <= BYTES_TARGET
    }

    /// Adds a message.
    ///
    /// # Panics
    ///
    /// Here and in the other ways to push, if the payload is longer than
    /// [`PAYLOAD_MAX`], or if it does not belong in this block (see
    /// [`BlockBuilder::takes`]).
    pub fn push(&mut self, head: MessageHead, payload: &[u8]) {
        self.push_slices(head, &[payload]);
    }

    /// Adds a message whose payload lies in several pieces.
    pub fn push_slices(&mut self, head: MessageHead, pieces: &[&[u8]]) {
        let len = pieces.iter().map(|piece| piece.len()).sum();
        self.begin(head, len, &Fields::default());
        for piece in pieces {
            self.bytes.extend_from_slice(piece);
        }
        self.pad();
    }

    /// Adds a message of `len` bytes that `write` copies in; the slice that it
    /// is given is zeroed. `letter` says what is known of its death.
    pub fn push_with(
        &mut self,
        head: MessageHead,
        letter: Option<&DeadLetter>,
        len: usize,
        write: impl FnOnce(&mut [u8]),
    ) {
        let fields = Fields {
            in_parts: None,
            letter: letter.cloned(),
        };
        self.begin(head, len, &fields);
        let start = self.bytes.len();
        self.bytes.resize(start + padded(len), 0);
        write(&mut self.bytes[start..start + len]);
    }

    /// Adds a message whose payload of `len` bytes lies in parts. `letter` says
    /// what is known of its death.
    ///
    /// # Panics
    ///
    /// If the builder is not empty: such a message has a block of its own.
    /// Otherwise as [`BlockBuilder::push`].
    pub fn push_in_parts(&mut self, head: MessageHead, letter: Option<&DeadLetter>, len: u32) {
        assert!(self.is_empty(), "a message in parts is alone in its block");
        assert!(
            len as usize <= PAYLOAD_MAX,
            "a payload of {len} bytes is too long"
        );
        let fields = Fields {
            in_parts: Some(len),
            letter: letter.cloned(),
        };
        self.begin(head, 0, &fields);
        self.in_parts = true;
    }

    /// Closes the block.
    ///
    /// # Panics
    ///
    /// If no message was pushed: a block is never empty.
    pub fn finish(mut self) -> Block {
        assert!(self.count > 0, "a block holds at least one message");
        let header = Header {
            count: self.count,
            table: offset(self.bytes.len()),
            payload: offset(self.payload),
        };
        self.bytes.extend_from_slice(&self.table);
        self.bytes[..HEADER_BYTES].copy_from_slice(&header.encode());
        let checksum = crc32fast::hash(&self.bytes[CHECKED_FROM..]);
        self.bytes[4..8].copy_from_slice(&checksum.to_le_bytes());
        // The block may stay in memory for long; unused room should not.
        if self.bytes.capacity() - self.bytes.len() > self.bytes.len() / 8 {
            self.bytes.shrink_to_fit();
        }
        Block {
            bytes: Bytes::from(self.bytes),
            header,
        }
    }

    /// Writes the entry and the optional fields of the message whose payload
    /// comes next.
    fn begin(&mut self, head: MessageHead, payload_len: usize, fields: &Fields) {
        assert!(
            payload_len <= PAYLOAD_MAX,
            "a payload of {payload_len} bytes is too long"
        );
        assert!(self.takes(payload_len), "the block is full");
        if self.is_empty() {
            self.bytes.resize(HEADER_BYTES, 0);
        }
        let start = self.bytes.len();
        fields.encode(&mut self.bytes);
        let optional_len = u16::try_from(self.bytes.len() - start)
            .expect("a message's optional fields are shorter than 64 KiB");
        self.pad();
        let flags = match fields.in_parts {
            Some(_) => FLAG_PARTS,
            None => 0,
        };
        let mut entry = [0; ENTRY_BYTES];
        entry[..8].copy_from_slice(&head.session.to_le_bytes());
        entry[8..16].copy_from_slice(&head.position.to_le_bytes());
        entry[16..24].copy_from_slice(&head.sent_at_ms.to_le_bytes());
        entry[24..28].copy_from_slice(&offset(start).to_le_bytes());
        entry[28..32].copy_from_slice(&offset(payload_len).to_le_bytes());
        entry[32..34].copy_from_slice(&head.attempts.to_le_bytes());
        entry[34..36].copy_from_slice(&flags.to_le_bytes());
        entry[36..38].copy_from_slice(&optional_len.to_le_bytes());
        self.table.extend_from_slice(&entry);
        self.count += 1;
        self.payload += payload_len;
    }

    fn pad(&mut self) {
        self.bytes.resize(padded(self.bytes.len()), 0);
    }
}

// A block's payloads end before `u32` does: less than `BYTES_TARGET` and then
// one payload, with the padding and the optional fields of every message.
const _: () = assert!(
    HEADER_BYTES + BYTES_TARGET + PAYLOAD_MAX + MESSAGES_MAX as usize * (16 + u16::MAX as usize)
        < u32::MAX as usize
);

/// Narrows a length that the limits on blocks keep small.
fn offset(bytes: usize) -> u32 {
    u32::try_from(bytes).expect("a block is shorter than 4 GiB")
}

fn padded(len: usize) -> usize {
    len.next_multiple_of(8)
}

fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([bytes[at], bytes[at + 1]])
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(array_at(bytes, at))
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(array_at(bytes, at))
}

fn array_at<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    let mut array = [0; N];
    array.copy_from_slice(&bytes[at..at + N]);
    array
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use ringmain::control::{DeadReason, NAME_BYTES_MAX};

    fn head(number: u64) -> MessageHead {
        MessageHead {
            session: 7,
            position: number,
            sent_at_ms: 1_700_000_000_000 + number,
            attempts: number as u16,
        }
    }

    fn pack(payloads: &[Vec<u8>]) -> Block {
        let mut builder = BlockBuilder::new();
        for (number, payload) in payloads.iter().enumerate() {
            builder.push(head(number as u64), payload);
        }
        builder.finish()
    }

    /// Sets the checksum right after the bytes were changed.
    fn sealed(mut bytes: Vec<u8>) -> Bytes {
        let checksum = crc32fast::hash(&bytes[CHECKED_FROM..]);
        bytes[4..8].copy_from_slice(&checksum.to_le_bytes());
        Bytes::from(bytes)
    }

    #[test]
    fn layout_is_as_drawn() {
        let block = pack(&[b"abc".to_vec()]);
        let bytes = block.as_bytes();
        assert_eq!(bytes.len(), 24 + 8 + 40);
        assert_eq!(&bytes[..4], b"RMbk");
        assert_eq!(
            &bytes[8..24],
            [1, 0, 0, 0, 1, 0, 0, 0, 32, 0, 0, 0, 3, 0, 0, 0]
        );
        assert_eq!(&bytes[24..32], b"abc\0\0\0\0\0");
        assert_eq!(&bytes[32..40], [7, 0, 0, 0, 0, 0, 0, 0]);
        assert_eq!(&bytes[56..64], [24, 0, 0, 0, 3, 0, 0, 0]);
        assert_eq!(&bytes[64..72], [0; 8]);
    }

    #[test]
    fn every_way_to_push_writes_the_same_bytes() {
        let whole = pack(&[b"hello world".to_vec(), Vec::new()]);
        let mut builder = BlockBuilder::with_capacity(2, 11);
        builder.push_with(head(0), None, 11, |room| {
            assert_eq!(room, [0; 11]);
            room.copy_from_slice(b"hello world");
        });
        builder.push_slices(head(1), &[]);
        assert_eq!(builder.finish().as_bytes(), whole.as_bytes());

        let mut builder = BlockBuilder::new();
        builder.push_slices(head(0), &[b"hello", b" ", b"world"]);
        builder.push_with(head(1), None, 0, |room| assert!(room.is_empty()));
        assert_eq!(builder.finish().as_bytes(), whole.as_bytes());
    }

    #[test]
    fn builder_is_full_at_either_limit() {
        let mut builder = BlockBuilder::new();
        assert!(builder.takes(PAYLOAD_MAX));
        for number in 0..u64::from(MESSAGES_MAX) {
            assert!(!builder.is_full());
            builder.push(head(number), b"");
        }
        assert!(builder.is_full() && !builder.takes(0));

        let mut builder = BlockBuilder::new();
        builder.push(head(0), &vec![1; BYTES_TARGET - 1]);
        assert!(builder.takes(BYTES_TARGET) && !builder.takes(BYTES_TARGET + 1));
        builder.push(head(1), b"x");
        assert!(builder.is_full() && !builder.takes(0));
        assert_eq!(builder.payload_total(), BYTES_TARGET);
    }

    #[test]
    fn small_block_keeps_no_large_buffer() {
        let mut builder = BlockBuilder::with_capacity(1024, BYTES_TARGET);
        builder.push(head(0), b"x");
        let block = builder.finish();
        let vec = Vec::from(block.bytes);
        assert!(vec.capacity() < 256, "{}", vec.capacity());
    }

    fn letter() -> DeadLetter {
        DeadLetter {
            reason: DeadReason::Rejected,
            source: "jöbs".to_owned(),
            died_at_ms: 1_700_000_000_005,
            attempts: 3,
        }
    }

    fn in_parts(letter: Option<&DeadLetter>, len: u32) -> Block {
        let mut builder = BlockBuilder::new();
        builder.push_in_parts(head(4), letter, len);
        builder.finish()
    }

    #[test]
    fn layout_of_a_dead_letter_in_parts_is_as_drawn() {
        let block = in_parts(Some(&letter()), 3 << 20);
        let bytes = block.as_bytes();
        assert_eq!(bytes.len(), 24 + 32 + 40);
        assert_eq!(
            &bytes[8..24],
            [1, 0, 0, 0, 1, 0, 0, 0, 56, 0, 0, 0, 0, 0, 0, 0]
        );
        assert_eq!(&bytes[24..35], [1, 8, 0, 0, 0, 48, 0, 0, 0, 0, 0]);
        assert_eq!(&bytes[35..38], [2, 16, 0]);
        assert_eq!(bytes[38..46], 1_700_000_000_005_u64.to_le_bytes());
        assert_eq!(&bytes[46..49], [3, 0, 2]);
        assert_eq!(&bytes[49..54], "jöbs".as_bytes());
        assert_eq!(&bytes[54..56], [0; 2]);
        // Start, no payload, attempts, the flag, length of the fields.
        assert_eq!(
            &bytes[80..96],
            [24, 0, 0, 0, 0, 0, 0, 0, 4, 0, 1, 0, 30, 0, 0, 0]
        );
    }

    #[test]
    fn payload_in_parts_is_alone_and_outside_of_the_block() {
        let mut builder = BlockBuilder::new();
        builder.push_in_parts(head(4), None, PAYLOAD_MAX as u32);
        assert!(builder.is_full() && !builder.takes(0));
        let block = Block::decode(Bytes::copy_from_slice(builder.finish().as_bytes())).unwrap();
        assert!(block.is_in_parts(0));
        assert_eq!(block.message(0), head(4));
        assert_eq!(block.payload_len(0), PAYLOAD_MAX);
        assert_eq!((block.payload(0), block.payload_total()), (&b""[..], 0));
        assert_eq!(block.letter(0), None);
        assert_eq!(Block::peek(block.as_bytes()), Ok((1, 0)));
    }

    #[test]
    fn dead_letters_stand_beside_other_messages() {
        let long = DeadLetter {
            reason: DeadReason::MaxAttempts,
            source: "x".repeat(NAME_BYTES_MAX),
            ..letter()
        };
        let mut builder = BlockBuilder::new();
        builder.push(head(0), b"alive");
        builder.push_with(head(1), Some(&letter()), 4, |room| {
            room.copy_from_slice(b"dead")
        });
        builder.push_with(head(2), Some(&long), 0, |_| {});
        builder.push(head(3), b"alive too");
        let block = Block::decode(Bytes::copy_from_slice(builder.finish().as_bytes())).unwrap();
        let letters = [0, 1, 2, 3].map(|index| block.letter(index));
        assert_eq!(letters, [None, Some(letter()), Some(long), None]);
        let payloads = [0, 1, 2, 3].map(|index| block.payload(index));
        assert_eq!(payloads, [&b"alive"[..], b"dead", b"", b"alive too"]);
        assert_eq!((block.payload_len(1), block.payload_total()), (4, 18));
        assert!(!block.is_in_parts(1));
    }

    /// One message with these flags and optional fields, and a payload.
    fn with_fields(flags: u16, fields: &[u8]) -> Result<Block, BadBlock> {
        let mut content = fields.to_vec();
        content.resize(padded(fields.len()), 0);
        content.extend(b"payload!");
        let table = HEADER_BYTES + content.len();
        let mut bytes = pack(&[content]).as_bytes().to_vec();
        bytes[20] = 8;
        bytes[table + 28] = 8;
        bytes[table + 34..table + 36].copy_from_slice(&flags.to_le_bytes());
        bytes[table + 36] = fields.len() as u8;
        Block::decode(sealed(bytes))
    }

    #[test]
    fn unknown_fields_are_skipped_and_unknown_flags_refused() {
        let unknown = [200, 1, 0, b'?'];
        let block = with_fields(0, &unknown).unwrap();
        assert_eq!(block.payload(0), b"payload!");
        assert_eq!(block.payload_range(0), 32..40);
        assert!(!block.is_in_parts(0) && block.letter(0).is_none());
        assert!(with_fields(2, &unknown).is_err());
        assert!(with_fields(0x8000, &unknown).is_err());
    }

    #[test]
    fn message_in_parts_must_be_marked_and_alone() {
        let length = [1, 8, 0, 5, 0, 0, 0, 0, 0, 0, 0];
        for (flags, fields) in [(0, &length[..]), (1, &[]), (1, &length)] {
            // The last one has a payload in the block as well.
            assert!(with_fields(flags, fields).is_err(), "{flags} {fields:?}");
        }
        // Two in one block, otherwise sound.
        let part = in_parts(None, 5);
        let (fields, entry) = part.as_bytes()[HEADER_BYTES..].split_at(16);
        let mut second = entry.to_vec();
        second[24] += 16;
        let header = Header {
            count: 2,
            table: 24 + 32,
            payload: 0,
        };
        let bytes = [&header.encode()[..], fields, fields, entry, &second].concat();
        let error = Block::decode(sealed(bytes)).unwrap_err();
        assert!(error.to_string().contains("alone"), "{error}");
    }

    #[test]
    fn any_flipped_bit_is_noticed() {
        let block = pack(&[b"first".to_vec(), b"second".to_vec()]);
        for bit in 0..block.as_bytes().len() * 8 {
            let mut bytes = block.as_bytes().to_vec();
            bytes[bit / 8] ^= 1 << (bit % 8);
            assert!(Block::decode(Bytes::from(bytes)).is_err(), "bit {bit}");
        }
        for len in 0..block.as_bytes().len() {
            assert!(Block::decode(block.bytes.slice(..len)).is_err());
        }
    }

    fn read_all(block: &Block) {
        let mut total = 0;
        for index in 0..block.len() {
            block.message(index);
            assert_eq!(block.payload(index), block.payload_bytes(index));
            assert_eq!(
                block.payload_len(index) == block.payload(index).len(),
                !block.is_in_parts(index) || block.payload_len(index) == 0
            );
            assert!(block.payload_len(index) <= PAYLOAD_MAX);
            block.letter(index);
            total += block.payload(index).len();
        }
        assert_eq!(total, block.payload_total());
    }

    proptest! {
        #[test]
        fn what_is_packed_is_read_back(
            payloads in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..100), 1..40)
        ) {
            let block = pack(&payloads);
            let read = Block::decode(Bytes::copy_from_slice(block.as_bytes())).unwrap();
            prop_assert_eq!(read.len() as usize, payloads.len());
            for (index, payload) in payloads.iter().enumerate() {
                prop_assert_eq!(read.payload(index as u32), &payload[..]);
                prop_assert_eq!(read.message(index as u32), head(index as u64));
                prop_assert_eq!(read.payload_range(index as u32).start % 8, 0);
            }
            read_all(&read);
        }

        // I8 and damage: with the checksum right, the structure must still be
        // checked before it is used.
        #[test]
        fn forged_bytes_never_panic(
            sizes in prop::collection::vec(0usize..40, 1..6),
            changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..6),
        ) {
            let mut builder = BlockBuilder::new();
            if sizes.len() == 1 {
                builder.push_in_parts(head(0), Some(&letter()), sizes[0] as u32);
            } else {
                for (&len, number) in sizes.iter().zip(0..) {
                    let letter = (number % 2 == 0).then(letter);
                    builder.push_with(head(number), letter.as_ref(), len, |room| room.fill(9));
                }
            }
            let mut bytes = builder.finish().as_bytes().to_vec();
            for (at, value) in changes {
                let at = at.index(bytes.len());
                bytes[at] = value;
            }
            if let Ok(block) = Block::decode(sealed(bytes)) {
                read_all(&block);
            }
        }

        #[test]
        fn random_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            prop_assert!(Block::decode(Bytes::from(bytes)).is_err());
        }
    }
}
