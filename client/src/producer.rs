//! Sends to one queue.

use crate::clock;
use crate::control::{Attached, flush_flags};
use crate::error::{Error, Result};
use crate::message::MessageId;
use crate::record::{Begun, CHUNK_BYTES, Chunk, SEND_HEAD_BYTES, inline_max_of_submission_ring};
use crate::session::Session;
use crate::settings::Confirm;
use crate::submitter::Submission;
use crate::wait::{Deadline, Progress};
use ringmain_ring::layout::attachment;
use ringmain_ring::payload::Loan;
use ringmain_ring::record_ring::record_bytes;
use ringmain_ring::wait::client;
use std::sync::Arc;
use std::time::Duration;

/// How a producer is to be, in [`Client::producer_with`].
///
/// [`Client::producer_with`]: crate::Client::producer_with
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ProducerOptions {
    confirm: Option<Confirm>,
}

impl ProducerOptions {
    /// As the queue has it.
    pub fn new() -> ProducerOptions {
        ProducerOptions::default()
    }

    /// What each send waits for. Default: the queue's setting.
    #[must_use]
    pub fn confirm(mut self, confirm: Confirm) -> ProducerOptions {
        self.confirm = Some(confirm);
        self
    }
}

/// Sends messages to one queue. Cheap to clone; any number of threads may use
/// it at once.
///
/// All producers of a [`Client`](crate::Client) write into the same ring. Order
/// is promised for what one thread sends, and for what is sent one after the
/// other otherwise.
///
/// A send needs no broker to be there: it is *accepted* once it lies in the ring,
/// and survives the death of any process. When the ring is full, or the queue at
/// a limit, sends wait.
#[derive(Debug, Clone)]
pub struct Producer {
    session: Arc<Session>,
    queue: Arc<str>,
    attachment: u32,
    message_bytes_max: usize,
    /// Longer payloads go into chunks.
    inline_bytes_max: usize,
    confirm: Confirm,
}

/// What a send's record has behind its head.
#[derive(Clone, Copy)]
enum Content<'a> {
    Inline(&'a [u8]),
    Chunk(&'a Loan),
}

impl Content<'_> {
    fn bytes(self) -> usize {
        match self {
            Content::Inline(payload) => payload.len(),
            Content::Chunk(_) => CHUNK_BYTES,
        }
    }
}

/// A send in the ring.
struct Sent {
    position: u64,
    /// Where its record ends.
    end: u64,
}

impl Sent {
    #[inline]
    fn new(position: u64, content_bytes: usize) -> Sent {
        let end = position + record_bytes(SEND_HEAD_BYTES + content_bytes) as u64;
        Sent { position, end }
    }
}

impl Producer {
    pub(crate) fn new(
        session: Arc<Session>,
        queue: &str,
        attached: &Attached,
        options: &ProducerOptions,
    ) -> Producer {
        let ring_bytes = session.map().geometry().submission_bytes;
        Producer {
            session,
            queue: queue.into(),
            attachment: attached.index,
            message_bytes_max: attached.settings.max_message_bytes as usize,
            inline_bytes_max: inline_max_of_submission_ring(ring_bytes) as usize,
            confirm: options.confirm.unwrap_or(attached.settings.confirm),
        }
    }

    /// The queue's name.
    pub fn queue(&self) -> &str {
        &self.queue
    }

    /// The longest payload that the queue takes, in bytes.
    pub fn max_message_bytes(&self) -> usize {
        self.message_bytes_max
    }

    /// Sends a message, and returns once it is accepted, or confirmed as far as
    /// the queue or the [`ProducerOptions`] say. Waits as long as that takes: for
    /// room, and for a broker that is away, if a confirmation is asked for. A
    /// payload of more than 15 KiB goes into shared memory of its own
    /// ([`Producer::loan`] spares its copy), which is asked of the broker the first
    /// time; afterwards chunks of it are used again when their messages are
    /// consumed or stored, and waited for if none is free.
    ///
    /// Errors: [`TooLarge`](Error::TooLarge), before anything is written;
    /// [`Full`](Error::Full) if a large payload finds no shared memory and waiting
    /// would not help;
    /// [`NoSuchQueue`](Error::NoSuchQueue) if the queue was deleted;
    /// [`Refused`](Error::Refused) if the broker refused this message (known only
    /// to who waits for a confirmation: else [`Producer::flush`] tells);
    /// [`Closed`](Error::Closed) if the broker ended the session and did not take
    /// the message in; [`Forked`](Error::Forked); [`Corrupt`](Error::Corrupt).
    #[inline]
    pub fn send(&self, payload: impl AsRef<[u8]>) -> Result<MessageId> {
        self.send_until(payload.as_ref(), Deadline::Never)
    }

    /// The same, but [`Full`](Error::Full) at once instead of waiting for room.
    /// If a confirmation is asked for, that is waited for.
    #[inline]
    pub fn try_send(&self, payload: impl AsRef<[u8]>) -> Result<MessageId> {
        self.send_until(payload.as_ref(), Deadline::Now)
    }

    /// The same, but [`TimedOut`](Error::TimedOut) when the time is over. If no
    /// confirmation is asked for, the message was not sent then; else it may have
    /// been accepted and lack its confirmation, which [`Producer::flush`] waits
    /// for.
    pub fn send_timeout(&self, payload: impl AsRef<[u8]>, timeout: Duration) -> Result<MessageId> {
        self.send_until(payload.as_ref(), Deadline::after(timeout))
    }

    /// Memory for a payload of `len` bytes, to be filled and sent without a copy:
    /// consumers of the same user read it where it was written. What it holds at
    /// first is unspecified. Waits, as [`Producer::send`] does, for chunks of
    /// earlier messages to come back.
    ///
    /// Errors: [`TooLarge`](Error::TooLarge); [`Full`](Error::Full) if there is no
    /// shared memory for it, and nothing that this client has sent would give some
    /// back; [`Closed`](Error::Closed), [`Forked`](Error::Forked),
    /// [`Corrupt`](Error::Corrupt), [`NotRunning`](Error::NotRunning) if the
    /// broker is away while it is needed for more memory.
    ///
    /// ```no_run
    /// # fn main() -> ringmain::Result<()> {
    /// let frames = ringmain::Client::connect()?.producer("frames")?;
    /// let mut frame = frames.loan(1920 * 1080 * 3)?;
    /// frame.fill(0x80);
    /// frame.send()?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn loan(&self, len: usize) -> Result<crate::Loan> {
        self.loan_until(len, Deadline::Never)
    }

    /// The same, but [`TimedOut`](Error::TimedOut) when the time is over.
    pub fn loan_timeout(&self, len: usize, timeout: Duration) -> Result<crate::Loan> {
        self.loan_until(len, Deadline::after(timeout))
    }

    fn loan_until(&self, len: usize, deadline: Deadline) -> Result<crate::Loan> {
        self.session.check_process()?;
        self.check_size(len)?;
        if len <= self.inline_bytes_max {
            return Ok(crate::Loan::short(self.clone(), len));
        }
        let chunk = self.session.allocate(len, deadline)?;
        Ok(crate::Loan::chunk(self.clone(), chunk))
    }

    /// Sends a chunk of this session.
    pub(crate) fn send_chunk(&self, chunk: Loan) -> Result<MessageId> {
        self.send_chunk_until(chunk, Deadline::Never)
    }

    /// Its owner is done with a chunk of this session, whether it was sent or not.
    pub(crate) fn put_back(&self, chunk: Loan) {
        if self.session.is_forked() {
            // Never unmap in the child.
            std::mem::forget(chunk);
        } else {
            self.session.outbounds().put_back(chunk);
        }
    }

    /// Sends many messages, in order, with as few steps as the ring's room
    /// allows, and waits once for their confirmation. The iterator is run to its
    /// end before anything is sent, and nothing is sent if one message is too
    /// large.
    ///
    /// Errors are those of [`Producer::send`]. [`Refused`](Error::Refused) names
    /// those that are not in the queue; after another error, the first ones may
    /// have been accepted.
    pub fn send_batch<I>(&self, payloads: I) -> Result<Vec<MessageId>>
    where
        I: IntoIterator,
        I::Item: AsRef<[u8]>,
    {
        let payloads: Vec<I::Item> = payloads.into_iter().collect();
        // Asked once: the length that was checked is the length that is copied.
        let payloads: Vec<&[u8]> = payloads.iter().map(AsRef::as_ref).collect();
        self.send_slices(&payloads)
    }

    /// Waits until everything that this client's producers sent before is
    /// confirmed at this level; at once if that is [`Confirm::Accepted`].
    ///
    /// [`Refused`](Error::Refused) lists all sends of this client (its producers
    /// share a session) that were refused since this was last reported; the rest
    /// is confirmed. Other errors: [`Closed`](Error::Closed),
    /// [`Forked`](Error::Forked), [`Corrupt`](Error::Corrupt).
    pub fn flush(&self, level: Confirm) -> Result<()> {
        self.flush_until(level, Deadline::Never)
    }

    /// The same, but [`TimedOut`](Error::TimedOut) when the time is over.
    pub fn flush_timeout(&self, level: Confirm, timeout: Duration) -> Result<()> {
        self.flush_until(level, Deadline::after(timeout))
    }

    fn flush_until(&self, level: Confirm, deadline: Deadline) -> Result<()> {
        self.session.check_process()?;
        let Some(flags) = flush_flags(level) else {
            return Ok(());
        };
        self.session.flush(flags, level, deadline)?;
        refused(self.session.take_refused())
    }

    #[inline]
    fn send_until(&self, payload: &[u8], deadline: Deadline) -> Result<MessageId> {
        match self.publish_at_once(payload) {
            Some(sent) => self.accepted(&sent, deadline),
            None => self.send_slowly(payload, deadline),
        }
    }

    /// The common case in few instructions: everything is as it should be, and
    /// no confirmation is asked for. Else nothing was written, and
    /// [`Producer::send_slowly`] finds out what there is to wait for or to say.
    fn publish_at_once(&self, payload: &[u8]) -> Option<Sent> {
        // First of all: in a forked child the words below are not mapped.
        if self.session.is_forked() {
            return None;
        }
        let fits = payload.len() <= self.inline_bytes_max.min(self.message_bytes_max);
        let open = self.session.attachment_bits(self.attachment) == 0;
        if !fits || !open || self.confirm != Confirm::Accepted {
            return None;
        }
        let mut submission = self.session.submit_at_once()?;
        let begun = submission.send(self.attachment, clock::wall_ms(), payload);
        let position = begun.ok()?.ok()?;
        submission.publish();
        Some(Sent::new(position, payload.len()))
    }

    #[cold]
    fn send_slowly(&self, payload: &[u8], deadline: Deadline) -> Result<MessageId> {
        self.session.check_process()?;
        self.check_size(payload.len())?;
        if payload.len() > self.inline_bytes_max {
            return self.send_chunk_until(self.copied(payload, deadline)?, deadline);
        }
        self.send_content(Content::Inline(payload), deadline)
    }

    /// A chunk with a copy of the payload.
    fn copied(&self, payload: &[u8], deadline: Deadline) -> Result<Loan> {
        let mut chunk = match (self.session.allocate(payload.len(), deadline), deadline) {
            (Err(Error::TimedOut), Deadline::Now) => {
                return Err(Error::Full(
                    "the payload segments of this client".to_owned(),
                ));
            }
            (allocated, _) => allocated?,
        };
        chunk.copy_from_slice(payload);
        Ok(chunk)
    }

    fn send_chunk_until(&self, chunk: Loan, deadline: Deadline) -> Result<MessageId> {
        if let Err(forked) = self.session.check_process() {
            self.put_back(chunk);
            return Err(forked);
        }
        let sent = self.send_content(Content::Chunk(&chunk), deadline);
        self.put_back(chunk);
        sent
    }

    fn send_content(&self, content: Content<'_>, deadline: Deadline) -> Result<MessageId> {
        if let Some(flags) = flush_flags(self.confirm) {
            return self.send_confirmed(content, flags, deadline);
        }
        let sent = self.publish_when_possible(content, None, deadline)?;
        self.accepted(&sent, deadline)
    }

    #[inline]
    fn accepted(&self, sent: &Sent, deadline: Deadline) -> Result<MessageId> {
        self.session.after_publish(sent.end, deadline)?;
        Ok(self.session.message_id(sent.position))
    }

    fn send_confirmed(
        &self,
        content: Content<'_>,
        flags: u16,
        deadline: Deadline,
    ) -> Result<MessageId> {
        let _confirming = self.session.confirming();
        let sent = self.publish_when_possible(content, Some(flags), deadline)?;
        let id = self.accepted(&sent, deadline)?;
        let deadline = match deadline {
            Deadline::Now => Deadline::Never,
            deadline => deadline,
        };
        self.session.confirmed(sent.end, self.confirm, deadline)?;
        refused(self.session.take_refusals_of(&[id]))?;
        Ok(id)
    }

    fn publish_when_possible(
        &self,
        content: Content<'_>,
        flush: Option<u16>,
        deadline: Deadline,
    ) -> Result<Sent> {
        let sent = self
            .session
            .wait_for(deadline, || self.publish(content, flush));
        match (sent, deadline) {
            (Err(Error::TimedOut), Deadline::Now) => Err(self.full()),
            (sent, _) => sent,
        }
    }

    /// Writes a send, and a flush if there are flags for one, if there is room
    /// for all.
    fn publish(&self, content: Content<'_>, flush: Option<u16>) -> Result<Progress<Sent>> {
        if let Some(wait) = self.held_back()? {
            return Ok(wait);
        }
        let sent_at_ms = clock::wall_ms();
        let mut submission = self.session.submit()?;
        let begun = self
            .write(&mut submission, sent_at_ms, content)
            .and_then(|begun| match (begun, flush) {
                (Ok(position), Some(flags)) => Ok(submission.flush(flags)?.map(|_| position)),
                (begun, _) => Ok(begun),
            });
        match begun {
            Ok(Ok(position)) => {
                if let Content::Chunk(chunk) = content {
                    chunk.take(position);
                }
                submission.publish();
                Ok(Progress::Done(Sent::new(position, content.bytes())))
            }
            Ok(Err(_)) => {
                drop(submission);
                self.wait_for_room()
            }
            Err(damaged) => {
                drop(submission);
                Err(self.session.corrupt(&damaged))
            }
        }
    }

    fn write(
        &self,
        submission: &mut Submission<'_>,
        sent_at_ms: u64,
        content: Content<'_>,
    ) -> Begun<u64> {
        match content {
            Content::Inline(payload) => submission.send(self.attachment, sent_at_ms, payload),
            Content::Chunk(loan) => {
                let chunk = Chunk {
                    segment: loan.segment(),
                    unit: loan.unit(),
                    // No longer than a message may be.
                    len: loan.len() as u32,
                };
                submission.send_chunk(self.attachment, sent_at_ms, chunk)
            }
        }
    }

    fn send_slices(&self, payloads: &[&[u8]]) -> Result<Vec<MessageId>> {
        self.session.check_process()?;
        for payload in payloads {
            self.check_size(payload.len())?;
        }
        let flags = flush_flags(self.confirm);
        let _confirming = flags.map(|_| self.session.confirming());
        let mut ids = Vec::with_capacity(payloads.len());
        while let Some(payload) = payloads.get(ids.len()) {
            if payload.len() > self.inline_bytes_max {
                ids.push(self.send_large_of_batch(payload)?);
                continue;
            }
            let end = self.session.wait_for(Deadline::Never, || {
                self.publish_run(&payloads[ids.len()..], &mut ids)
            })?;
            self.session.after_publish(end, Deadline::Never)?;
        }
        if let Some(flags) = flags {
            self.session.flush(flags, self.confirm, Deadline::Never)?;
            refused(self.session.take_refusals_of(&ids))?;
        }
        Ok(ids)
    }

    fn send_large_of_batch(&self, payload: &[u8]) -> Result<MessageId> {
        let chunk = self.copied(payload, Deadline::Never)?;
        let content = Content::Chunk(&chunk);
        let sent = self
            .publish_when_possible(content, None, Deadline::Never)
            .and_then(|sent| self.accepted(&sent, Deadline::Never));
        self.put_back(chunk);
        sent
    }

    /// Writes as many of these as there is room for, up to the first that needs a
    /// chunk, and publishes them together. Returns where they end.
    fn publish_run(&self, payloads: &[&[u8]], ids: &mut Vec<MessageId>) -> Result<Progress<u64>> {
        if let Some(wait) = self.held_back()? {
            return Ok(wait);
        }
        let sent_at_ms = clock::wall_ms();
        let already = ids.len();
        let mut submission = self.session.submit()?;
        let inline = |payload: &&&[u8]| payload.len() <= self.inline_bytes_max;
        for payload in payloads.iter().take_while(inline) {
            match submission.send(self.attachment, sent_at_ms, payload) {
                Ok(Ok(position)) => ids.push(self.session.message_id(position)),
                Ok(Err(_)) => break,
                Err(damaged) => {
                    drop(submission);
                    return Err(self.session.corrupt(&damaged));
                }
            }
        }
        if ids.len() > already {
            return Ok(Progress::Done(submission.publish()));
        }
        drop(submission);
        self.wait_for_room()
    }

    fn wait_for_room<T>(&self) -> Result<Progress<T>> {
        self.session.check_open()?;
        Ok(Progress::Wait(client::ROOM))
    }

    /// Whether the queue takes nothing at the moment.
    #[inline]
    fn held_back<T>(&self) -> Result<Option<Progress<T>>> {
        match self.session.attachment_bits(self.attachment) {
            0 => Ok(None),
            bits if bits & attachment::DELETED != 0 => {
                Err(Error::NoSuchQueue(self.queue.to_string()))
            }
            _ => {
                self.session.check_open()?;
                Ok(Some(Progress::Wait(client::LIMIT)))
            }
        }
    }

    #[inline]
    fn check_size(&self, bytes: usize) -> Result<()> {
        if bytes > self.message_bytes_max {
            return Err(Error::TooLarge {
                bytes: bytes as u64,
                limit: self.message_bytes_max as u64,
            });
        }
        Ok(())
    }

    fn full(&self) -> Error {
        let bits = self.session.attachment_bits(self.attachment);
        Error::Full(if bits & attachment::PAUSED != 0 {
            format!("sending to the queue {} is paused", self.queue)
        } else if bits & attachment::FULL != 0 {
            format!("the queue {} is at its limit", self.queue)
        } else {
            "the submission ring of this client".to_owned()
        })
    }
}

fn refused(refusals: Vec<crate::error::Refusal>) -> Result<()> {
    if refusals.is_empty() {
        return Ok(());
    }
    Err(Error::Refused(refusals))
}
