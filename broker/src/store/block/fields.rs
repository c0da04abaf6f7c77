//! The optional fields of a message, laid out as the block's module says.

use super::{BadBlock, PAYLOAD_MAX, u16_at, u64_at};
use ringmain::control::{DeadLetter, DeadReason};

const IN_PARTS: u8 = 1;
const DEAD_LETTER: u8 = 2;
/// Tag and length.
const FIELD_HEADER_BYTES: usize = 3;
/// A dead letter before the name.
const LETTER_BYTES: usize = 11;

/// What the optional fields of one message say.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub(super) struct Fields {
    /// The payload lies in parts, and has this many bytes.
    pub(super) in_parts: Option<u32>,
    pub(super) letter: Option<DeadLetter>,
}

impl Fields {
    /// Appends the fields to `bytes`.
    pub(super) fn encode(&self, bytes: &mut Vec<u8>) {
        if let Some(len) = self.in_parts {
            put_header(bytes, IN_PARTS, 8);
            bytes.extend(u64::from(len).to_le_bytes());
        }
        if let Some(letter) = &self.letter {
            put_header(bytes, DEAD_LETTER, LETTER_BYTES + letter.source.len());
            bytes.extend(letter.died_at_ms.to_le_bytes());
            bytes.extend(letter.attempts.to_le_bytes());
            bytes.push(letter.reason as u8);
            bytes.extend(letter.source.as_bytes());
        }
    }

    /// Reads the fields, and skips those that it does not know.
    pub(super) fn decode(mut bytes: &[u8]) -> Result<Fields, BadBlock> {
        let mut fields = Fields::default();
        let mut last = 0;
        while !bytes.is_empty() {
            let (tag, value, rest) = split(bytes)?;
            if tag <= last {
                return Err(BadBlock("a message's optional fields are out of order"));
            }
            match tag {
                IN_PARTS => fields.in_parts = Some(decode_in_parts(value)?),
                DEAD_LETTER => fields.letter = Some(decode_letter(value)?),
                _ => {}
            }
            (last, bytes) = (tag, rest);
        }
        Ok(fields)
    }
}

fn put_header(bytes: &mut Vec<u8>, tag: u8, len: usize) {
    let len = u16::try_from(len).expect("a queue's name is far shorter than 64 KiB");
    bytes.push(tag);
    bytes.extend(len.to_le_bytes());
}

/// The tag and value of the first field, and what is behind it.
fn split(bytes: &[u8]) -> Result<(u8, &[u8], &[u8]), BadBlock> {
    const CUT: BadBlock = BadBlock("a message's optional fields are cut short");
    if bytes.len() < FIELD_HEADER_BYTES {
        return Err(CUT);
    }
    let (header, rest) = bytes.split_at(FIELD_HEADER_BYTES);
    let len = usize::from(u16_at(header, 1));
    let (value, rest) = rest.split_at_checked(len).ok_or(CUT)?;
    Ok((header[0], value, rest))
}

fn decode_in_parts(value: &[u8]) -> Result<u32, BadBlock> {
    const WRONG: BadBlock = BadBlock("the length of a message in parts makes no sense");
    if value.len() != 8 || u64_at(value, 0) > PAYLOAD_MAX as u64 {
        return Err(WRONG);
    }
    u32::try_from(u64_at(value, 0)).map_err(|_| WRONG)
}

fn decode_letter(value: &[u8]) -> Result<DeadLetter, BadBlock> {
    const WRONG: BadBlock = BadBlock("what it says of a dead letter makes no sense");
    if value.len() < LETTER_BYTES {
        return Err(WRONG);
    }
    let (facts, name) = value.split_at(LETTER_BYTES);
    let reason = match facts[10] {
        reason if reason == DeadReason::MaxAttempts as u8 => DeadReason::MaxAttempts,
        reason if reason == DeadReason::Rejected as u8 => DeadReason::Rejected,
        _ => return Err(WRONG),
    };
    Ok(DeadLetter {
        reason,
        source: str::from_utf8(name).map_err(|_| WRONG)?.to_owned(),
        died_at_ms: u64_at(facts, 0),
        attempts: u16_at(facts, 8),
    })
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn letter() -> DeadLetter {
        DeadLetter {
            reason: DeadReason::MaxAttempts,
            source: "jobs".to_owned(),
            died_at_ms: 7,
            attempts: u16::MAX,
        }
    }

    fn encoded(fields: &Fields) -> Vec<u8> {
        let mut bytes = Vec::new();
        fields.encode(&mut bytes);
        bytes
    }

    #[test]
    fn fields_are_read_back() {
        for in_parts in [None, Some(0), Some(PAYLOAD_MAX as u32)] {
            for letter in [None, Some(letter())] {
                let fields = Fields { in_parts, letter };
                assert_eq!(Fields::decode(&encoded(&fields)), Ok(fields));
            }
        }
        assert!(encoded(&Fields::default()).is_empty());
    }

    #[test]
    fn fields_cut_anywhere_between_are_refused() {
        let both = encoded(&Fields {
            in_parts: Some(5),
            letter: Some(letter()),
        });
        for cut in 1..both.len() {
            // After the first field alone it is sound.
            assert_eq!(Fields::decode(&both[..cut]).is_ok(), cut == 11, "{cut}");
        }
    }

    #[test]
    fn hostile_fields_are_refused() {
        let too_long = (PAYLOAD_MAX as u64 + 1).to_le_bytes();
        let facts = |reason: u8, name: &[u8]| [&[0; 10], &[reason][..], name].concat();
        let field = |tag: u8, value: &[u8]| [&[tag, value.len() as u8, 0], value].concat();
        let hostile = [
            field(0, b"x"),
            field(IN_PARTS, &too_long),
            field(IN_PARTS, &[0xff; 8]),
            field(IN_PARTS, &[0; 7]),
            field(IN_PARTS, &[0; 9]),
            field(DEAD_LETTER, &facts(0, b"name")),
            field(DEAD_LETTER, &facts(3, b"name")),
            field(DEAD_LETTER, &facts(1, b"\xff\xfe")),
            field(DEAD_LETTER, &[0; 10]),
            // Twice, and out of order.
            [field(IN_PARTS, &[0; 8]), field(IN_PARTS, &[0; 8])].concat(),
            [field(9, b""), field(IN_PARTS, &[0; 8])].concat(),
        ];
        for bytes in hostile {
            assert!(Fields::decode(&bytes).is_err(), "{bytes:?}");
        }
    }

    proptest! {
        #[test]
        fn random_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..40)) {
            let _ = Fields::decode(&bytes);
            let mut bytes = bytes;
            bytes.splice(0..0, [DEAD_LETTER, 20, 0]);
            let _ = Fields::decode(&bytes);
        }
    }
}
