//! What the status board shows of queues.

use super::{Hub, Queue};
use crate::hub::port::Port;
use serde::{Deserialize, Serialize};

/// A queue at one moment.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct QueueStatus {
    /// Its name.
    pub name: String,
    /// Messages that are not settled: ready and leased ones.
    pub messages: u64,
    /// Messages under a lease.
    pub leased: u64,
    /// Sessions attached to send.
    pub producers: u32,
    /// Sessions attached to receive.
    pub consumers: u32,
    /// Sends taken in since the broker was in service.
    pub sends: u64,
    /// Deliveries since then.
    pub deliveries: u64,
    /// Acks since then.
    pub acks: u64,
    /// Sends in the last second.
    pub sends_per_s: u64,
    /// Deliveries in the last second.
    pub deliveries_per_s: u64,
    /// Acks in the last second.
    pub acks_per_s: u64,
    /// How long ago the message that is to be delivered next was sent, in
    /// milliseconds; none if no message waits, or it is being read.
    pub oldest_ms: Option<u64>,
    /// Messages that are on disk alone.
    pub on_disk: u64,
    /// Bytes of memory that waiting messages of it take.
    pub memory_bytes: u64,
}

impl Hub {
    /// Every queue, by name. `wall_ms` is the time, in milliseconds since the Unix
    /// epoch. Of a queue whose backlog is in the store alone, the oldest messages
    /// are asked for, so that their age is known next time.
    pub fn queue_status(&mut self, wall_ms: u64, port: &mut impl Port) -> Vec<QueueStatus> {
        let mut all: Vec<QueueStatus> = Vec::with_capacity(self.by_name.len());
        for queue in self.queues.iter_mut().flatten() {
            let lists = [queue.dying, queue.again, queue.ready];
            let first = lists.iter().find_map(|list| list.first());
            if first.is_none() && !queue.gap.is_empty() {
                queue.ask_for(queue.gap.start, port);
            }
            let oldest = first.map(|first| self.messages[first].sent_at_ms);
            all.push(QueueStatus {
                // Unknown until a round of this life, or a read, has it.
                oldest_ms: oldest
                    .filter(|&sent| sent > 0)
                    .map(|sent| wall_ms.saturating_sub(sent)),
                ..queue.status()
            });
        }
        all.sort_unstable_by(|a, b| a.name.cmp(&b.name));
        all
    }

    /// Bytes of stored messages in memory.
    pub fn cached_bytes(&self) -> usize {
        self.queues.iter().flatten().map(|q| q.cached_bytes).sum()
    }
}

impl Queue {
    fn status(&self) -> QueueStatus {
        QueueStatus {
            name: self.row.name.clone(),
            messages: self.messages,
            leased: self.leased,
            producers: self.producers,
            consumers: self.consumers.len() as u32,
            sends: self.sends,
            deliveries: self.deliveries,
            acks: self.acks,
            on_disk: self.gap.end - self.gap.start,
            memory_bytes: (self.cached_bytes + self.freezing_bytes) as u64,
            ..QueueStatus::default()
        }
    }
}
