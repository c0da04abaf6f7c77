//! Receives from one queue.

use crate::clock;
use crate::control::{WINDOW_DEFAULT, flush_flags};
use crate::error::{Error, Result};
use crate::message::Message;
use crate::payload::Payload;
use crate::record::{Delivered, Delivery, Lease, submission};
use crate::segments::Named;
use crate::session::Session;
use crate::settings::Confirm;
use crate::wait::{Deadline, Progress};
use ringmain_ring::layout::attachment;
use ringmain_ring::record_ring::{Reader, Record};
use ringmain_ring::wait::client;
use std::sync::Arc;
use std::time::Duration;

/// Room for answers is kept for so many messages at a time, so that most of
/// them take the session's lock only when they are answered.
const CREDIT_LOT: u64 = 64;

/// How a consumer is to be, in [`Client::consumer_with`].
///
/// [`Client::consumer_with`]: crate::Client::consumer_with
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConsumerOptions {
    pub(crate) window: u32,
}

impl Default for ConsumerOptions {
    fn default() -> ConsumerOptions {
        ConsumerOptions {
            window: WINDOW_DEFAULT,
        }
    }
}

impl ConsumerOptions {
    /// With the defaults.
    pub fn new() -> ConsumerOptions {
        ConsumerOptions::default()
    }

    /// How many messages the consumer may have at a time: received and not
    /// answered, or sent to it ahead. 1 to
    /// [`WINDOW_MAX`](crate::control::WINDOW_MAX); default
    /// [`WINDOW_DEFAULT`]. A small window spreads slow work evenly over
    /// consumers, a large one keeps a fast consumer busy.
    #[must_use]
    pub fn window(mut self, window: u32) -> ConsumerOptions {
        self.window = window;
        self
    }
}

/// Receives messages from one queue, oldest first. It has a session of its own,
/// and is used by one thread at a time; messages may be answered anywhere.
///
/// Dropping it ends the session: messages that are not answered go back to the
/// queue, those still in the program's hands included.
#[derive(Debug)]
pub struct Consumer {
    session: Arc<Session>,
    queue: Arc<str>,
    attachment: u32,
    intake: Intake,
}

/// The reading end of the delivery ring.
#[derive(Debug)]
struct Intake {
    reader: Reader,
    /// The next delivery, which waits for the segment that it names.
    pending: Option<Record>,
    /// How many deliveries may be taken before room for more answers is kept.
    credits: u64,
    /// Up to where the ring was freed when we last looked whether the broker
    /// sleeps for want of room.
    looked_at: u64,
}

impl Consumer {
    pub(crate) fn new(session: Arc<Session>, queue: &str, attachment: u32) -> Consumer {
        Consumer {
            session,
            queue: queue.into(),
            attachment,
            intake: Intake {
                reader: Reader::new(0, 0),
                pending: None,
                credits: 0,
                looked_at: 0,
            },
        }
    }

    /// The queue's name.
    pub fn queue(&self) -> &str {
        &self.queue
    }

    /// The next message. Waits for one as long as it takes, through restarts of
    /// the broker.
    ///
    /// Errors: [`NoSuchQueue`](Error::NoSuchQueue) if the queue was deleted,
    /// [`Closed`](Error::Closed) if the broker ended the session,
    /// [`Forked`](Error::Forked), [`Corrupt`](Error::Corrupt).
    #[inline]
    pub fn recv(&mut self) -> Result<Message> {
        match self.try_recv()? {
            Some(message) => Ok(message),
            None => self.recv_until(Deadline::Never),
        }
    }

    /// The next message, or `None` when the time is over. Otherwise as
    /// [`Consumer::recv`].
    pub fn recv_timeout(&mut self, timeout: Duration) -> Result<Option<Message>> {
        if let Some(message) = self.try_recv()? {
            return Ok(Some(message));
        }
        match self.recv_until(Deadline::after(timeout)) {
            Ok(message) => Ok(Some(message)),
            Err(Error::TimedOut) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// The next message if one is there. Errors are those of
    /// [`Consumer::recv`].
    #[inline]
    pub fn try_recv(&mut self) -> Result<Option<Message>> {
        self.session.check_process()?;
        match self.intake.take(&self.session)? {
            Progress::Done(message) => Ok(Some(message)),
            Progress::Wait(_) => {
                self.check_queue()?;
                Ok(None)
            }
        }
    }

    /// Waits for a message, and returns it with those that are there behind it,
    /// at most `max` (0 gives none, at once). Errors are those of
    /// [`Consumer::recv`].
    pub fn recv_batch(&mut self, max: usize) -> Result<Vec<Message>> {
        if max == 0 {
            return Ok(Vec::new());
        }
        let mut messages = vec![self.recv()?];
        while messages.len() < max {
            match self.intake.take(&self.session) {
                Ok(Progress::Done(message)) => messages.push(message),
                // An error comes again with the next call; these are good.
                Ok(Progress::Wait(_)) | Err(_) => break,
            }
        }
        Ok(messages)
    }

    /// Waits until all answers (acks, nacks, extends) given before are confirmed
    /// at this level; at once if that is [`Confirm::Accepted`].
    ///
    /// [`LeaseLost`](Error::LeaseLost) counts the messages, since this was last
    /// reported, whose lease had ended before their answer came; the rest is
    /// confirmed. Other errors: [`Closed`](Error::Closed),
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
        match self.session.take_lost() {
            0 => Ok(()),
            count => Err(Error::LeaseLost { count }),
        }
    }

    #[cold]
    fn recv_until(&mut self, deadline: Deadline) -> Result<Message> {
        let Consumer {
            session,
            queue,
            attachment,
            intake,
        } = self;
        session.wait_for(deadline, || match intake.take(session)? {
            Progress::Wait(bits) => {
                check_queue(session, queue, *attachment)?;
                Ok(Progress::Wait(bits))
            }
            done => Ok(done),
        })
    }

    fn check_queue(&self) -> Result<()> {
        check_queue(&self.session, &self.queue, self.attachment)
    }
}

impl Drop for Consumer {
    fn drop(&mut self) {
        self.session.close();
    }
}

/// Whether there can be more messages.
fn check_queue(session: &Session, queue: &str, index: u32) -> Result<()> {
    session.check_open()?;
    if session.attachment_bits(index) & attachment::DELETED != 0 {
        return Err(Error::NoSuchQueue(queue.to_owned()));
    }
    Ok(())
}

impl Intake {
    /// Takes the next delivery that is not too late.
    #[inline]
    fn take(&mut self, session: &Arc<Session>) -> Result<Progress<Message>> {
        // Ends: each turn takes a delivery, for which a credit is needed, and
        // the broker gives no more than the window.
        loop {
            if self.credits == 0 && !self.find_credits(session)? {
                return Ok(Progress::Wait(client::ROOM));
            }
            let ring = session.map().delivery();
            let Some(record) = self.next(session)? else {
                self.found_empty(session);
                return Ok(Progress::Wait(client::MESSAGES | client::LIMIT));
            };
            let (delivery, place) =
                Delivery::read(&record, ring).map_err(|e| session.corrupt(&e))?;
            let payload = match place {
                Delivered::Inline { offset, len } => Payload::copied(ring.area, offset, len),
                place => match Self::chunk(session, &delivery, place)? {
                    Some(payload) => payload,
                    None => {
                        self.pending = Some(record);
                        return Ok(Progress::Wait(client::MESSAGES));
                    }
                },
            };
            self.free(session, &record);
            self.credits -= 1;
            let lease = Lease {
                delivery_position: record.position,
                entry: delivery.entry,
            };
            if delivery.deadline_ns > clock::monotonic_ns() {
                // Its lease went back when the broker began to close the session,
                // and another may have acked it since.
                if session.is_closing() {
                    session.check_open()?;
                }
                let session = Arc::clone(session);
                return Ok(Progress::Done(Message::new(
                    payload, &delivery, lease, session,
                )));
            }
            // Its lease has ended or is about to: it is not handed out, since
            // the ack would come too late, and was no attempt.
            session.nack(submission::NACK_UNCOUNTED, 0, lease)?;
        }
    }

    #[inline]
    fn next(&mut self, session: &Session) -> Result<Option<Record>> {
        if self.pending.is_some() {
            return Ok(self.pending.take());
        }
        let next = self.reader.next(session.map().delivery());
        next.map_err(|e| session.corrupt(&e))
    }

    /// The payload of a delivery that is in a chunk. `None`: its segment has yet
    /// to come.
    #[cold]
    fn chunk(session: &Session, delivery: &Delivery, place: Delivered) -> Result<Option<Payload>> {
        let named = match place {
            Delivered::InPlace(chunk) => Named::Outbound(delivery.session, chunk),
            Delivered::Inbound(chunk) => Named::Inbound(chunk),
            Delivered::Inline { .. } => return Ok(None),
        };
        Ok(session.find_chunk(named)?.map(Payload::Chunk))
    }

    /// Frees the record, and wakes a broker that needs the room, at every
    /// quarter of the ring.
    ///
    /// That is often enough, and spares each message a fence: a broker sleeps for
    /// room only with a record that found none, which is a quarter of the ring at
    /// most, so that three quarters lie before us untaken. We take a quarter of
    /// them, and look, or find the ring empty, and look then.
    #[inline]
    fn free(&mut self, session: &Session, record: &Record) {
        let ring = session.map().delivery();
        self.reader.free(ring, record.end());
        if record.end() - self.looked_at >= ring.area.size() as u64 / 4 {
            self.look(session);
        }
    }

    #[inline]
    fn found_empty(&mut self, session: &Session) {
        if self.looked_at != self.reader.freed() {
            self.look(session);
        }
    }

    #[cold]
    fn look(&mut self, session: &Session) {
        self.looked_at = self.reader.freed();
        session.offer_room();
    }

    /// Keeps room for the answers of the next messages. Returns whether there is
    /// room for one.
    #[cold]
    fn find_credits(&mut self, session: &Session) -> Result<bool> {
        // A broker that can't answer takes in nothing, and frees no room.
        session.drain_answers()?;
        self.credits = session.reserve(CREDIT_LOT)?;
        Ok(self.credits > 0)
    }
}
