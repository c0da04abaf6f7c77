//! A session: the mapped segment, and what the threads of this process share of
//! it. Producers and consumers are thin around this.

use crate::answers::Answers;
use crate::connection::{Connection, Done, instance_of};
use crate::control::{Attached, Opened, Purpose, Request, Rings, WireError};
use crate::error::{Error, Refusal, Result};
use crate::fork::Maker;
use crate::link::Link;
use crate::lock;
use crate::message::MessageId;
use crate::outbound::Outbounds;
use crate::record::{Begun, Lease};
use crate::segments::{Named, Segments};
use crate::settings::Confirm;
use crate::submitter::{Submission, Submitter};
use crate::wait::{Deadline, Progress};
use ringmain_ring::layout::{ATTACHMENTS_MAX, Geometry, LAYOUT_VERSION, NOT_FINAL, attachment};
use ringmain_ring::payload::ReadChunk;
use ringmain_ring::session::SessionMap;
use ringmain_ring::wait::{SLEEP_MAX, broker, client};
use ringmain_ring::{AtomicU64, Ordering};
use std::fs::File;
use std::path::Path;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

/// See the module.
#[derive(Debug)]
pub(crate) struct Session {
    maker: Maker,
    /// Counted of itself, so that a forked child can leave it alone: what is
    /// mapped at that address in the child is not the segment.
    map: Arc<SessionMap>,
    submitter: Mutex<Submitter>,
    answers: Mutex<Answers>,
    link: Link,
    outbounds: Outbounds,
    /// Of a consumer.
    segments: Mutex<Segments>,
    /// Messages of a consumer that are being read in shared memory.
    reading: AtomicUsize,
    /// Why nothing works any more.
    failure: OnceLock<WireError>,
}

impl Session {
    /// Opens a session of its own with the broker at `socket`.
    pub(crate) fn open(socket: &Path, geometry: Geometry) -> Result<Session> {
        let maker = Maker::this_process()?;
        let (mut connection, hello) = Connection::greeted(socket)?;
        let (opened, [segment, doorbell]): (Opened, _) = connection.call_for(&Request::Open {
            layout: LAYOUT_VERSION,
            rings: Rings::from(geometry),
        })?;
        let map = SessionMap::open(&File::from(segment), Path::new("the session's segment"))?;
        let identity = (instance_of(&hello)?, opened.session);
        if (map.instance(), map.session()) != identity || map.geometry() != geometry {
            return Err(Error::Corrupt(
                "the segment is of another session".to_owned(),
            ));
        }
        let answers = Answers::new(opened.session, map.answers());
        let session = Session {
            maker,
            map: Arc::new(map),
            submitter: Mutex::new(Submitter::new()),
            answers: Mutex::new(answers),
            link: Link::new(socket, identity, connection, doorbell),
            outbounds: Outbounds::default(),
            segments: Mutex::default(),
            reading: AtomicUsize::new(0),
            failure: OnceLock::new(),
        };
        // Over the link: a broker that dies after it noted this has a successor that
        // knows the session, and is asked again.
        let _: Done = session.link.call(&Request::Ready)?;
        Ok(session)
    }

    /// Attaches the session to a queue.
    pub(crate) fn attach(&self, queue: &str, purpose: Purpose, window: u32) -> Result<Attached> {
        self.maker.check()?;
        let queue = queue.to_owned();
        let request = Request::Attach {
            queue,
            purpose,
            window,
        };
        let attached: Attached = self.link.call(&request)?;
        if attached.index as usize >= ATTACHMENTS_MAX {
            return Err(Error::Corrupt("an attachment beyond the last".to_owned()));
        }
        Ok(attached)
    }

    /// The segment. Not to be touched in a forked child.
    #[inline]
    pub(crate) fn map(&self) -> &SessionMap {
        &self.map
    }

    /// The connection.
    pub(crate) fn link(&self) -> &Link {
        &self.link
    }

    /// The outbound payload segments.
    pub(crate) fn outbounds(&self) -> &Outbounds {
        &self.outbounds
    }

    /// The bytes of a chunk that a delivery names, to be counted by
    /// [`Session::begin_reading`]. `None`: its segment was not announced yet, which
    /// a broker does before the delivery; it was waited for a moment.
    pub(crate) fn find_chunk(&self, named: Named) -> Result<Option<ReadChunk>> {
        const PATIENCE: Duration = Duration::from_millis(20);
        let found = lock(&self.segments).find(named)?;
        if found.is_some() {
            return Ok(found);
        }
        self.take_notices(PATIENCE)?;
        lock(&self.segments).find(named)
    }

    fn take_notices(&self, patience: Duration) -> Result<()> {
        for (notice, descriptor) in self.link.notices(patience)? {
            let noted = lock(&self.segments).note(notice, descriptor);
            // What can't be mapped can't be read: the messages go to others.
            noted.inspect_err(|error| self.fail(error))?;
        }
        Ok(())
    }

    /// A message is read in shared memory from now on.
    pub(crate) fn begin_reading(&self) {
        // Relaxed: asked by who drops the consumer, which has given out no more
        // messages by then.
        self.reading.fetch_add(1, Relaxed);
    }

    /// And from now on not any more.
    pub(crate) fn end_reading(&self) {
        self.reading.fetch_sub(1, Relaxed);
    }

    /// [`Error::Forked`] in a child of the process that opened the session.
    #[inline]
    pub(crate) fn check_process(&self) -> Result<()> {
        self.maker.check()
    }

    /// Whether this is a child of that process.
    #[inline]
    pub(crate) fn is_forked(&self) -> bool {
        self.maker.is_forked()
    }

    /// The identity of a send of this session.
    #[inline]
    pub(crate) fn message_id(&self, position: u64) -> MessageId {
        MessageId {
            session: self.map.session(),
            position,
        }
    }

    /// The bits of an attachment's word: what speaks against sending.
    #[inline]
    pub(crate) fn attachment_bits(&self, index: u32) -> u32 {
        // Relaxed: a hint; the broker decides when it takes the send in. An
        // index beyond the last was refused by `attach`.
        self.map
            .attachment(index)
            .map_or(attachment::DELETED, |word| word.load(Ordering::Relaxed))
    }

    /// Locks the submission ring for writing.
    #[inline]
    pub(crate) fn submit(&self) -> Result<Submission<'_>> {
        self.maker.check()?;
        self.submit_at_once().ok_or_else(|| self.failure())
    }

    /// The same, or `None` for any reason why not: [`Session::submit`] tells it.
    #[inline]
    pub(crate) fn submit_at_once(&self) -> Option<Submission<'_>> {
        if self.maker.is_forked() {
            return None;
        }
        let submitter = lock(&self.submitter);
        if submitter.closed {
            return None;
        }
        Some(Submission {
            submitter,
            ring: self.map.submission(),
        })
    }

    /// Writes one record and publishes it. Returns its end, or `None` if there
    /// is no room.
    #[inline]
    pub(crate) fn submit_one(
        &self,
        write: impl FnOnce(&mut Submission<'_>) -> Begun<u64>,
    ) -> Result<Option<u64>> {
        let mut submission = self.submit()?;
        match write(&mut submission) {
            Ok(Ok(_)) => Ok(Some(submission.publish())),
            Ok(Err(_)) => Ok(None),
            Err(damaged) => {
                drop(submission);
                Err(self.corrupt(&damaged))
            }
        }
    }

    /// After a publish that ended at `end`: wakes the broker if it sleeps, and
    /// sees to it that the submission was taken in if the session is ending.
    #[inline]
    pub(crate) fn after_publish(&self, end: u64, deadline: Deadline) -> Result<()> {
        // The fence in there pairs with those in the broker's `announce` and
        // `set`: either the broker's next look at the tail sees our publish, or
        // we see here that it sleeps, or closes the session.
        let seen = self.map.broker_wait().seen_after_publish();
        if seen & (broker::SUBMISSIONS | broker::CLOSING | broker::ORPHANED) == 0 {
            return Ok(());
        }
        self.attend(seen);
        if seen & broker::CLOSING == 0 {
            return Ok(());
        }
        self.was_taken_in(end, deadline)
    }

    /// The same for who is not interested in the end of the session.
    pub(crate) fn after_publish_quietly(&self) {
        self.attend(self.map.broker_wait().seen_after_publish());
    }

    #[cold]
    fn attend(&self, seen: u32) {
        if (seen & broker::ORPHANED != 0 || !self.link.is_up())
            && let Err(error) = self.link.keep_up_in_passing()
        {
            // The submission stands: it lies in the ring. Later calls say it.
            self.fail(&error);
        }
        if seen & broker::SUBMISSIONS != 0 {
            self.wake_broker(broker::SUBMISSIONS);
        }
    }

    /// Rings if the broker still waits for this; of many threads, one does. What
    /// it waits for stays announced while its doorbell is not known.
    fn wake_broker(&self, bits: u32) {
        if self.link.is_up() && self.map.broker_wait().take(bits) != 0 {
            self.link.ring();
        }
    }

    /// After deliveries or answers were taken: wakes the broker if it sleeps for
    /// want of room for them.
    pub(crate) fn offer_room(&self) {
        if self.map.broker_wait().seen_after_publish() & broker::ROOM != 0 {
            self.wake_broker(broker::ROOM);
        }
    }

    /// The broker closes the session: waits until it has said up to where it has
    /// read, and tells whether that is beyond `end`.
    #[cold]
    fn was_taken_in(&self, end: u64, deadline: Deadline) -> Result<()> {
        let deadline = match deadline {
            // Who would not wait for room has to wait here, but not long.
            Deadline::Now => Deadline::after(SLEEP_MAX),
            deadline => deadline,
        };
        let last = self.wait_for(deadline, || {
            Ok(match self.final_position() {
                Some(last) => Progress::Done(last),
                None => Progress::Wait(client::ALL),
            })
        });
        lock(&self.submitter).closed = true;
        match last {
            Ok(last) if end <= last => Ok(()),
            Ok(_) => Err(self.failure()),
            Err(_) => Err(Error::Closed(
                "the broker ends the session, and has not said yet whether it took this in"
                    .to_owned(),
            )),
        }
    }

    fn final_position(&self) -> Option<u64> {
        // Acquire: pairs with the broker's Release; its last steps for the
        // session come before.
        let word = &self.map.header().confirmations.final_position;
        Some(word.load(Ordering::Acquire)).filter(|position| *position != NOT_FINAL)
    }

    /// Whether the broker has begun to close the session.
    #[inline]
    pub(crate) fn is_closing(&self) -> bool {
        self.map.broker_wait().peek() & broker::CLOSING != 0
    }

    /// [`Error::Closed`] if there is no sense in waiting for the broker to do
    /// something new.
    pub(crate) fn check_open(&self) -> Result<()> {
        if self.is_closing() || self.failure.get().is_some() {
            return Err(self.failure());
        }
        Ok(())
    }

    /// Whether a new producer can use the session.
    pub(crate) fn is_open(&self) -> bool {
        self.check_open().is_ok()
    }

    /// Asks that everything before be confirmed, and waits for it.
    pub(crate) fn flush(&self, flags: u16, level: Confirm, deadline: Deadline) -> Result<()> {
        self.check_process()?;
        let end = self.wait_for(deadline, || {
            self.drain_answers()?;
            match self.submit_one(|submission| submission.flush(flags))? {
                Some(end) => Ok(Progress::Done(end)),
                None => self.check_open().map(|()| Progress::Wait(client::ROOM)),
            }
        })?;
        self.after_publish(end, deadline)?;
        self.confirmed(end, level, deadline)
    }

    /// Waits until everything before `end` is confirmed. All answers to it have
    /// been drained then.
    pub(crate) fn confirmed(&self, end: u64, level: Confirm, deadline: Deadline) -> Result<()> {
        let cursor = self.cursor(level);
        self.wait_for(deadline, || {
            // Acquire: pairs with the broker's Release; answers to what is
            // confirmed were written before.
            if cursor.load(Ordering::Acquire) >= end {
                return Ok(Progress::Done(()));
            }
            match self.final_position() {
                Some(last) if end > last => Err(self.failure()),
                _ => Ok(Progress::Wait(client::CONFIRMATION)),
            }
        })?;
        self.drain_answers()
    }

    fn cursor(&self, level: Confirm) -> &AtomicU64 {
        let confirmations = &self.map.header().confirmations;
        match level {
            Confirm::Synced => &confirmations.synced,
            Confirm::Accepted | Confirm::Stored => &confirmations.stored,
        }
    }

    /// Takes the answers out of their ring.
    pub(crate) fn drain_answers(&self) -> Result<()> {
        let drained = lock(&self.answers).drain(self.map.answers());
        if drained.map_err(|e| self.corrupt(&e))? {
            self.offer_room();
        }
        Ok(())
    }

    /// The refusals that nobody was told.
    pub(crate) fn take_refused(&self) -> Vec<Refusal> {
        lock(&self.answers).take_refused()
    }

    /// How many leases were lost that nobody was told of.
    pub(crate) fn take_lost(&self) -> u64 {
        lock(&self.answers).take_lost()
    }

    /// The refusals of these sends.
    pub(crate) fn take_refusals_of(&self, ids: &[MessageId]) -> Vec<Refusal> {
        let mut answers = lock(&self.answers);
        ids.iter()
            .filter_map(|id| answers.take_refusal_of(*id))
            .collect()
    }

    /// While this is kept, [`Session::take_refusals_of`] finds what was sent
    /// since.
    pub(crate) fn confirming(&self) -> Confirming<'_> {
        lock(&self.answers).confirming += 1;
        Confirming(self)
    }

    /// Acks leases. Never waits: their room was kept.
    #[inline]
    pub(crate) fn ack(&self, leases: &[Lease]) -> Result<()> {
        match self.submit_one(|submission| submission.ack(leases))? {
            Some(end) => self.after_publish(end, Deadline::Now),
            None => Err(no_room()),
        }
    }

    /// Gives a lease back. Never waits.
    pub(crate) fn nack(&self, flags: u16, delay_ms: u64, lease: Lease) -> Result<()> {
        match self.submit_one(|submission| submission.nack(flags, delay_ms, &[lease]))? {
            Some(end) => self.after_publish(end, Deadline::Now),
            None => Err(no_room()),
        }
    }

    /// Gives a lease back, and has nobody to tell if that fails.
    pub(crate) fn return_lease(&self, lease: Lease) {
        if let Ok(Some(_)) = self.submit_one(|submission| submission.nack(0, 0, &[lease])) {
            self.after_publish_quietly();
        }
    }

    /// Extends a lease. [`Error::Full`] instead of waiting.
    pub(crate) fn extend(&self, duration_ms: u64, lease: Lease) -> Result<()> {
        match self.submit_one(|submission| submission.extend(duration_ms, lease))? {
            Some(end) => self.after_publish(end, Deadline::Now),
            None => Err(no_room()),
        }
    }

    /// Keeps room for the answers of more leases; returns of how many.
    pub(crate) fn reserve(&self, count: u64) -> Result<u64> {
        let mut submission = self.submit()?;
        let granted = submission.reserve(count);
        drop(submission);
        granted.map_err(|damaged| self.corrupt(&damaged))
    }

    /// What a waiting thread does each time before it sleeps: reports a failed
    /// session, drains answers, looks after the connection. Returns how long it
    /// may sleep.
    pub(crate) fn look_around(&self, left: Duration) -> Result<Duration> {
        if self.failure.get().is_some() {
            return Err(self.failure());
        }
        self.drain_answers()?;
        if self.is_closing() {
            // Nothing to resume; what is waited for comes through the segment.
            return Ok(SLEEP_MAX);
        }
        match self.link.keep_up(left).and_then(|up| {
            self.take_notices(Duration::ZERO)?;
            Ok(up)
        }) {
            Ok(true) => Ok(SLEEP_MAX),
            Ok(false) => Ok(crate::link::RETRY),
            Err(error) => {
                self.fail(&error);
                Err(error)
            }
        }
    }

    /// The session is of no more use, since what the broker, or somebody else,
    /// wrote into it is not what it must be.
    #[cold]
    pub(crate) fn corrupt(&self, what: &dyn std::fmt::Display) -> Error {
        let error = Error::Corrupt(format!("session {}: {what}", self.map.session()));
        self.fail(&error);
        error
    }

    /// Ends the session with this as the answer to all later calls.
    fn fail(&self, error: &Error) {
        self.give_up(error);
        self.link.close();
    }

    fn give_up(&self, error: &Error) {
        self.failure.get_or_init(|| WireError::from(error));
        lock(&self.submitter).closed = true;
    }

    #[cold]
    fn failure(&self) -> Error {
        match self.failure.get() {
            Some(error) => error.clone().into(),
            None => Error::Closed("the broker has ended the session: connect again".to_owned()),
        }
    }

    /// Ends the session from this side: leases go back, and what was submitted
    /// before stands. Payloads that are being read in shared memory stay as they
    /// are: the broker keeps them for us until the socket is closed, with the last
    /// of their messages.
    pub(crate) fn close(&self) {
        if self.is_forked() {
            return;
        }
        // The record is for a broker that is away and does not see the socket
        // close, and for one that does not see it close yet.
        let ended = self.submit().is_ok_and(|mut submission| {
            let written = matches!(submission.end(), Ok(Ok(_)));
            if written {
                submission.publish();
            }
            written
        });
        if ended {
            self.after_publish_quietly();
        }
        self.give_up(&Error::Closed("the consumer was dropped".to_owned()));
        // While something is read the socket stays, whether the record could be
        // written or not.
        if self.reading.load(Relaxed) == 0 {
            self.leave();
        }
    }

    /// Nothing is read any more. Without a broker nobody sees the socket close, so
    /// the segment says it too.
    fn leave(&self) {
        self.map.client_wait().set(client::GONE);
        self.link.close();
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        self.close();
        if !self.is_forked() {
            self.leave();
        } else {
            // Never unmap in the child: it may have something else there.
            std::mem::forget(Arc::clone(&self.map));
            std::mem::forget(std::mem::take(&mut self.outbounds));
            std::mem::forget(std::mem::take(&mut self.segments));
        }
    }
}

fn no_room() -> Error {
    Error::Full("the submission ring of this session".to_owned())
}

/// See [`Session::confirming`].
pub(crate) struct Confirming<'a>(&'a Session);

impl Drop for Confirming<'_> {
    fn drop(&mut self) {
        lock(&self.0.answers).confirming -= 1;
    }
}
