//! A message as its consumer holds it.

use crate::clock;
use crate::error::Result;
use crate::payload::Payload;
use crate::record::{Delivery, LEASES_MAX, Lease, submission};
use crate::session::Session;
use bytes::Bytes;
use serde::{Deserialize, Serialize};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Identifies a message for ever: the session that sent it, and the position of
/// its record in that session's submission ring. Of one session's messages, the
/// earlier has the lesser identity.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct MessageId {
    /// The sender's session; never used again within one broker's data.
    pub session: u64,
    /// Position in the session's submission ring, in bytes.
    pub position: u64,
}

impl std::fmt::Display for MessageId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}-{}", self.session, self.position)
    }
}

/// A message under a lease of this process. [`ack`](Message::ack) says that it
/// is done; dropping it gives it back to its queue.
///
/// It may be sent to, and answered from, any thread. Its answers never wait and
/// need no broker to be there: the room for them was kept when it was received.
/// Once its [`Consumer`](crate::Consumer) is dropped its lease has gone back, and
/// answers fail with [`Error::Closed`](crate::Error::Closed); the payload stays.
pub struct Message {
    payload: Payload,
    id: MessageId,
    lease: Lease,
    sent_at_ms: u64,
    /// Moved by `extend`.
    deadline_ns: AtomicU64,
    attempts: u32,
    redelivered: bool,
    /// The lease was answered.
    answered: bool,
    session: Arc<Session>,
}

impl Message {
    #[inline]
    pub(crate) fn new(
        payload: Payload,
        delivery: &Delivery,
        lease: Lease,
        session: Arc<Session>,
    ) -> Message {
        if matches!(payload, Payload::Chunk(_)) {
            session.begin_reading();
        }
        Message {
            payload,
            id: MessageId {
                session: delivery.session,
                position: delivery.position,
            },
            lease,
            sent_at_ms: delivery.sent_at_ms,
            deadline_ns: AtomicU64::new(delivery.deadline_ns),
            attempts: delivery.attempts,
            redelivered: delivery.redelivered,
            answered: false,
            session,
        }
    }

    /// What was sent. A large payload lies in shared memory, where its sender wrote
    /// it or the broker copied it, and is not copied again; it stays until the
    /// message is answered, also past the end of its lease. (A sender of the same
    /// user could change it there against the rules; one of another user can't.)
    #[inline]
    pub fn payload(&self) -> &[u8] {
        self.payload.bytes()
    }

    /// The payload as [`Bytes`], for what takes such. Nothing is copied: the bytes
    /// hold the message, whose lease goes on, and ack it when the last clone or
    /// slice of them is dropped. Whoever keeps them longer than the lease lasts
    /// gets the message again, and copies instead.
    pub fn into_bytes(self) -> Bytes {
        Bytes::from_owner(Held(Some(self)))
    }

    /// Which message this is. A redelivery has the same identity.
    #[inline]
    pub fn id(&self) -> MessageId {
        self.id
    }

    /// How often the message was attempted before this delivery: its leases that
    /// ended without an ack after a client had taken it.
    #[inline]
    pub fn attempts(&self) -> u32 {
        self.attempts
    }

    /// Whether the message was leased before, to this consumer or another. If
    /// not, nobody can have worked on it yet.
    #[inline]
    pub fn redelivered(&self) -> bool {
        self.redelivered
    }

    /// When it was sent, by the wall clock of the sender; to about 4 ms.
    pub fn sent_at(&self) -> SystemTime {
        UNIX_EPOCH + Duration::from_millis(self.sent_at_ms)
    }

    /// How much longer the message is held for this consumer, to about 4 ms.
    /// Zero: it may be delivered to another one already.
    pub fn lease_remaining(&self) -> Duration {
        // Relaxed: the word stands for itself.
        let deadline_ns = self.deadline_ns.load(Ordering::Relaxed);
        Duration::from_nanos(deadline_ns.saturating_sub(clock::monotonic_ns()))
    }

    /// The message is done and never comes again. `Ok` means that the ack is
    /// *accepted*, and survives any process's death; [`Consumer::flush`] waits
    /// for more, and tells of acks that came after the lease had ended.
    ///
    /// Does not wait. Errors: [`Closed`](crate::Error::Closed),
    /// [`Forked`](crate::Error::Forked), [`Corrupt`](crate::Error::Corrupt).
    ///
    /// [`Consumer::flush`]: crate::Consumer::flush
    #[inline]
    pub fn ack(mut self) -> Result<()> {
        self.answered = true;
        self.session.ack(&[self.lease])
    }

    /// Acks messages, many in one record: cheaper than one by one. An iterator
    /// that panics acks nothing. All are tried; the first error is returned.
    /// Otherwise as [`Message::ack`].
    pub fn ack_batch(messages: impl IntoIterator<Item = Message>) -> Result<()> {
        let mut messages: Vec<Message> = messages.into_iter().collect();
        let mut leases = Vec::with_capacity(messages.len().min(LEASES_MAX));
        let mut result = Ok(());
        for run in messages.chunk_by_mut(|a, b| Arc::ptr_eq(&a.session, &b.session)) {
            for part in run.chunks_mut(LEASES_MAX) {
                leases.clear();
                leases.extend(part.iter_mut().map(|message| {
                    message.answered = true;
                    message.lease
                }));
                result = result.and(part[0].session.ack(&leases));
            }
        }
        result
    }

    /// Gives the message back to its queue, to be delivered again no earlier
    /// than `delay` from now (rounded down to milliseconds). Counts as an
    /// attempt. Otherwise as [`Message::ack`].
    pub fn nack(mut self, delay: Duration) -> Result<()> {
        self.answered = true;
        self.session.nack(0, millis(delay), self.lease)
    }

    /// Gives the message back to its queue, at once, as one that nobody has worked
    /// on: does not count as an attempt. Otherwise as [`Message::ack`].
    pub fn release(mut self) -> Result<()> {
        self.answered = true;
        self.session.nack(submission::NACK_UNCOUNTED, 0, self.lease)
    }

    /// The message can't be processed by anybody: it moves to its queue's
    /// dead-letter queue. Otherwise as [`Message::ack`].
    pub fn reject(mut self) -> Result<()> {
        self.answered = true;
        self.session.nack(submission::NACK_REJECT, 0, self.lease)
    }

    /// Keeps the message for at least `duration` from now (rounded down to
    /// milliseconds); a lease that lasts longer anyway is not shortened. Does
    /// not wait: [`Full`](crate::Error::Full) if the broker has fallen so far
    /// behind that there is only room for answers. Otherwise as
    /// [`Message::ack`].
    pub fn extend(&self, duration: Duration) -> Result<()> {
        let duration_ms = millis(duration);
        self.session.extend(duration_ms, self.lease)?;
        let duration_ns = duration_ms.saturating_mul(1_000_000);
        let deadline_ns = clock::monotonic_ns().saturating_add(duration_ns);
        // Relaxed: the word stands for itself.
        self.deadline_ns.fetch_max(deadline_ns, Ordering::Relaxed);
        Ok(())
    }
}

/// Gives the message back to its queue, at once, unless it was answered.
impl Drop for Message {
    #[inline]
    fn drop(&mut self) {
        if !self.answered {
            self.session.return_lease(self.lease);
        }
        if let Payload::Chunk(_) = self.payload {
            self.end_reading();
        }
    }
}

impl Message {
    #[cold]
    fn end_reading(&mut self) {
        if self.session.is_forked() {
            // Never unmap in the child.
            let payload = std::mem::replace(&mut self.payload, Payload::empty());
            std::mem::forget(payload);
        } else {
            self.session.end_reading();
        }
    }
}

/// A message as the owner of [`Bytes`].
struct Held(Option<Message>);

impl AsRef<[u8]> for Held {
    fn as_ref(&self) -> &[u8] {
        self.0.as_ref().map_or(&[], Message::payload)
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        if let Some(message) = self.0.take() {
            // The message comes again if this fails, as after any end of a lease.
            let _ = message.ack();
        }
    }
}

impl std::fmt::Debug for Message {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Message")
            .field("id", &self.id)
            .field("len", &self.payload().len())
            .field("attempts", &self.attempts)
            .field("redelivered", &self.redelivered)
            .finish_non_exhaustive()
    }
}

fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}
