//! What was received, as consumers recorded it, against what was sent.

use super::message::Head;
use crate::cli::exit::{FAILED, Failure};
use ringmain::Message;
use std::collections::HashMap;
use std::path::Path;

const REDELIVERED: u32 = 1;
const DAMAGED: u32 = 2;
const FLAG_BITS: u32 = 8;

/// One message received: `producer u32 | queue and flags u32 | sequence u64 |
/// latency (ns) u64`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Record {
    producer: u32,
    queue: u32,
    sequence: u64,
    /// From the send to the taking.
    latency_ns: u64,
    redelivered: bool,
    damaged: bool,
}

impl Record {
    pub(super) const BYTES: usize = 24;

    /// Of a message just taken from this queue.
    pub(super) fn of(message: &Message, queue: u32, now_ns: u64) -> Record {
        let head = Head::read(message.payload());
        let damaged = head.is_none();
        let head = head.unwrap_or(Head {
            producer: 0,
            sequence: 0,
            sent_ns: now_ns,
        });
        Record {
            producer: head.producer,
            queue,
            sequence: head.sequence,
            latency_ns: now_ns.saturating_sub(head.sent_ns),
            redelivered: message.redelivered(),
            damaged,
        }
    }

    pub(super) fn write(&self, bytes: &mut Vec<u8>) {
        let flags = u32::from(self.redelivered) * REDELIVERED + u32::from(self.damaged) * DAMAGED;
        bytes.extend_from_slice(&self.producer.to_le_bytes());
        bytes.extend_from_slice(&(self.queue << FLAG_BITS | flags).to_le_bytes());
        bytes.extend_from_slice(&self.sequence.to_le_bytes());
        bytes.extend_from_slice(&self.latency_ns.to_le_bytes());
    }

    fn read(bytes: &[u8; Record::BYTES]) -> Record {
        let word = |at: usize| {
            let mut word = [0; 8];
            word.copy_from_slice(&bytes[at..at + 8]);
            u64::from_le_bytes(word)
        };
        let second = (word(0) >> 32) as u32;
        Record {
            producer: word(0) as u32,
            queue: second >> FLAG_BITS,
            sequence: word(8),
            latency_ns: word(16),
            redelivered: second & REDELIVERED != 0,
            damaged: second & DAMAGED != 0,
        }
    }
}

/// What one consumer process received, in its order.
#[derive(Debug, Default)]
pub(super) struct Received {
    pub(super) records: Vec<Record>,
    /// The first so many were acked; or about to be, when it was killed.
    pub(super) acked: u64,
}

impl Received {
    pub(super) fn read(path: &Path, acked: u64) -> Result<Received, Failure> {
        let bytes = std::fs::read(path).map_err(|e| Failure::io(path.display(), &e))?;
        let (whole, rest) = bytes.as_chunks::<{ Record::BYTES }>();
        // A kill leaves a write done or not done, on the file systems we know.
        if !rest.is_empty() {
            return Err(Failure::new(FAILED, format!("{}: cut off", path.display())));
        }
        Ok(Received {
            records: whole.iter().map(Record::read).collect(),
            acked,
        })
    }
}

/// What one producer sent.
#[derive(Debug, Clone, Default)]
pub(super) struct Sent {
    /// Messages below this number were sent.
    pub(super) count: u64,
    /// Except these, which a kill left in doubt.
    pub(super) in_doubt: Vec<u64>,
}

/// What came of it.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Tally {
    /// Accepted for certain.
    pub(super) sent: u64,
    /// Sends of killed producers that may have been accepted or not.
    pub(super) in_doubt: u64,
    /// How many of those arrived.
    pub(super) in_doubt_delivered: u64,
    /// Messages that were sent for certain, and arrived.
    pub(super) delivered: u64,
    /// Deliveries marked as repeated.
    pub(super) redelivered: u64,
    /// Sent for certain, and nobody got and kept it.
    pub(super) lost: u64,
    /// Deliveries after a later message of the same producer, to the same
    /// consumer from the same queue; both delivered for the first time.
    pub(super) out_of_order: u64,
    /// Second deliveries that were not marked as such, or came after the ack.
    pub(super) duplicated: u64,
    /// Damaged messages, and such that nobody sent.
    pub(super) damaged: u64,
    /// Latencies of first deliveries in nanoseconds, ascending.
    pub(super) latencies_ns: Vec<u64>,
}

/// One delivery of a message.
#[derive(Debug, Clone, Copy)]
struct Take {
    latency_ns: u64,
    redelivered: bool,
    acked: bool,
}

impl Tally {
    /// Counts. `sent` is by the producer's number.
    pub(super) fn count(sent: &[Sent], received: &[Received]) -> Tally {
        let mut tally = Tally::default();
        // How often each message was taken, up to 255; and whether it was kept.
        let mut taken: Vec<Vec<u8>> = sent.iter().map(|s| vec![0; s.count as usize]).collect();
        let mut kept: Vec<Vec<bool>> = sent.iter().map(|s| vec![false; s.count as usize]).collect();
        for consumer in received {
            tally.look_at_order(&consumer.records);
            for (index, record) in consumer.records.iter().enumerate() {
                let (producer, sequence) = (record.producer as usize, record.sequence as usize);
                let known = taken.get_mut(producer).and_then(|t| t.get_mut(sequence));
                let Some(times) = known.filter(|_| !record.damaged) else {
                    tally.damaged += 1;
                    continue;
                };
                *times = times.saturating_add(1);
                kept[producer][sequence] |= (index as u64) < consumer.acked;
                if record.redelivered {
                    tally.redelivered += 1;
                } else {
                    tally.latencies_ns.push(record.latency_ns);
                }
            }
        }
        tally.latencies_ns.sort_unstable();
        tally.look_for_duplicates(&taken, received);
        for (sent, kept) in sent.iter().zip(&kept) {
            tally.look_for_losses(sent, kept);
        }
        tally
    }

    fn look_at_order(&mut self, records: &[Record]) {
        let mut latest: HashMap<(u32, u32), u64> = HashMap::new();
        for record in records.iter().filter(|r| !r.redelivered && !r.damaged) {
            let latest = latest.entry((record.producer, record.queue)).or_insert(0);
            // Numbers start at 0, so the next one due is kept.
            if record.sequence < *latest {
                self.out_of_order += 1;
            }
            *latest = (*latest).max(record.sequence + 1);
        }
    }

    fn look_for_duplicates(&mut self, taken: &[Vec<u8>], received: &[Received]) {
        let mut repeated: HashMap<(u32, u64), Vec<Take>> = HashMap::new();
        for consumer in received {
            for (index, record) in consumer.records.iter().enumerate() {
                let times = taken
                    .get(record.producer as usize)
                    .and_then(|t| t.get(record.sequence as usize));
                if times.is_some_and(|&times| times > 1) && !record.damaged {
                    let takes = repeated.entry((record.producer, record.sequence));
                    takes.or_default().push(Take {
                        latency_ns: record.latency_ns,
                        redelivered: record.redelivered,
                        acked: (index as u64) < consumer.acked,
                    });
                }
            }
        }
        for takes in repeated.values_mut() {
            // All latencies of a message count from the same moment.
            takes.sort_unstable_by_key(|take| take.latency_ns);
            let unmarked = takes.iter().skip(1).filter(|t| !t.redelivered).count();
            let after_ack = takes.iter().skip_while(|t| !t.acked).skip(1).count();
            self.duplicated += unmarked.max(after_ack) as u64;
        }
    }

    fn look_for_losses(&mut self, sent: &Sent, kept: &[bool]) {
        let arrived = kept.iter().filter(|&&kept| kept).count() as u64;
        let in_doubt = sent.in_doubt.len() as u64;
        let in_doubt_delivered = sent
            .in_doubt
            .iter()
            .filter(|&&sequence| kept.get(sequence as usize) == Some(&true))
            .count() as u64;
        self.in_doubt += in_doubt;
        self.in_doubt_delivered += in_doubt_delivered;
        let certain = sent.count - in_doubt;
        let delivered = arrived - in_doubt_delivered;
        self.sent += certain;
        self.delivered += delivered;
        self.lost += certain - delivered;
    }

    /// The latency that so many per thousand of the messages do not exceed.
    pub(super) fn latency_ns(&self, per_thousand: u64) -> u64 {
        let count = self.latencies_ns.len() as u64;
        let rank = (count * per_thousand).div_ceil(1000).max(1) - 1;
        self.latencies_ns.get(rank as usize).copied().unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(sequence: u64) -> Record {
        Record {
            producer: 0,
            queue: 1,
            sequence,
            latency_ns: 1000 * (sequence + 1),
            redelivered: false,
            damaged: false,
        }
    }

    fn again(sequence: u64, latency_ns: u64) -> Record {
        Record {
            latency_ns,
            redelivered: true,
            ..record(sequence)
        }
    }

    fn received(records: &[Record], acked: u64) -> Received {
        let records = records.to_vec();
        Received { records, acked }
    }

    fn sent(count: u64, in_doubt: &[u64]) -> Vec<Sent> {
        let in_doubt = in_doubt.to_vec();
        vec![Sent { count, in_doubt }]
    }

    #[test]
    fn records_survive_their_file() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("records");
        let records = [record(7), again(1 << 50, 5)];
        let mut bytes = Vec::new();
        records.iter().for_each(|record| record.write(&mut bytes));
        std::fs::write(&path, bytes).expect("write");
        let read = Received::read(&path, 2).expect("read");
        assert_eq!(read.records, records);
    }

    #[test]
    fn all_is_well_when_each_came_once_in_order() {
        let one = received(&[record(0), record(2)], 2);
        let other = received(&[record(1), record(3)], 2);
        let tally = Tally::count(&sent(4, &[]), &[one, other]);
        assert_eq!((tally.sent, tally.delivered, tally.lost), (4, 4, 0));
        assert_eq!(
            (tally.out_of_order, tally.duplicated, tally.damaged),
            (0, 0, 0)
        );
        assert_eq!(tally.latency_ns(500), 2000);
        assert_eq!(tally.latency_ns(999), 4000);
    }

    #[test]
    fn what_nobody_kept_is_lost() {
        let killed = received(&[record(0), record(1)], 1);
        let tally = Tally::count(&sent(3, &[]), &[killed]);
        assert_eq!((tally.delivered, tally.lost), (1, 2));
    }

    #[test]
    fn a_redelivery_to_another_is_fine_and_no_disorder() {
        let killed = received(&[record(0), record(1)], 1);
        let heir = received(&[record(2), again(1, 9000)], 2);
        let tally = Tally::count(&sent(3, &[]), &[killed, heir]);
        assert_eq!((tally.delivered, tally.lost, tally.redelivered), (3, 0, 1));
        assert_eq!((tally.out_of_order, tally.duplicated), (0, 0));
    }

    #[test]
    fn disorder_and_duplicates_are_found() {
        let swapped = received(&[record(1), record(0)], 2);
        assert_eq!(Tally::count(&sent(2, &[]), &[swapped]).out_of_order, 1);

        let unmarked = [received(&[record(0)], 0), received(&[record(0)], 1)];
        assert_eq!(Tally::count(&sent(1, &[]), &unmarked).duplicated, 1);

        let after_ack = [received(&[record(0)], 1), received(&[again(0, 9000)], 1)];
        assert_eq!(Tally::count(&sent(1, &[]), &after_ack).duplicated, 1);

        let unknown = received(&[record(5)], 1);
        assert_eq!(Tally::count(&sent(1, &[]), &[unknown]).damaged, 1);
    }

    #[test]
    fn sends_in_doubt_are_told_apart() {
        let tally = Tally::count(&sent(3, &[1]), &[received(&[record(0), record(2)], 2)]);
        assert_eq!((tally.sent, tally.delivered, tally.lost), (2, 2, 0));
        assert_eq!((tally.in_doubt, tally.in_doubt_delivered), (1, 0));
        let all = received(&[record(0), record(1), record(2)], 3);
        let tally = Tally::count(&sent(3, &[1]), &[all]);
        assert_eq!((tally.sent, tally.delivered, tally.lost), (2, 2, 0));
        assert_eq!((tally.in_doubt, tally.in_doubt_delivered), (1, 1));
    }
}
