//! Lines and descriptors on the control socket. Client and broker share this
//! file; both use non-blocking sockets, and each call here does one system call
//! at most.

use crate::control::LINE_BYTES_MAX;
use crate::error::{Error, Result};
use nix::errno::Errno;
use nix::sys::socket::{ControlMessage, ControlMessageOwned, MsgFlags, UnixAddr, recvmsg, sendmsg};
use serde::Serialize;
use std::io::{self, IoSlice, IoSliceMut};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};

/// Most descriptors that go with one line.
pub const DESCRIPTORS_MAX: usize = 4;
/// SCM_MAX_FD: most that the kernel passes at a time.
const KERNEL_DESCRIPTORS_MAX: usize = 253;
/// Bytes read at a time.
const READ_BYTES: usize = 16 * 1024;

/// A message as its line, newline included. [`Error::Invalid`] if that would be
/// longer than [`LINE_BYTES_MAX`].
pub fn encode(message: &impl Serialize) -> Result<Vec<u8>> {
    let mut line = serde_json::to_vec(message)
        .map_err(|e| Error::Invalid(format!("no line can be made of it: {e}")))?;
    line.push(b'\n');
    if line.len() > LINE_BYTES_MAX {
        return Err(Error::Invalid(format!(
            "a line of {} bytes: at most {LINE_BYTES_MAX} can be sent",
            line.len()
        )));
    }
    Ok(line)
}

/// Sends the beginning of `bytes`, and how much of it went is returned; the
/// descriptors, at most [`DESCRIPTORS_MAX`], go with its first byte, so that who
/// calls again for the rest gives none. `WouldBlock` when the socket is full.
/// A closed socket is an error and no signal.
pub fn send(socket: impl AsFd, bytes: &[u8], descriptors: &[BorrowedFd<'_>]) -> io::Result<usize> {
    let parts = [IoSlice::new(bytes)];
    let numbers: Vec<RawFd> = descriptors.iter().map(AsRawFd::as_raw_fd).collect();
    let rights = [ControlMessage::ScmRights(&numbers)];
    let rights = if numbers.is_empty() { &[] } else { &rights[..] };
    let socket = socket.as_fd().as_raw_fd();
    loop {
        match sendmsg::<UnixAddr>(socket, &parts, rights, MsgFlags::MSG_NOSIGNAL, None) {
            Err(Errno::EINTR) => {}
            sent => return Ok(sent?),
        }
    }
}

/// Reads once from the socket: bytes go to `lines`, descriptors (closed on exec)
/// to the end of `descriptors`, in the order of their sending. Returns how many
/// bytes came; 0 at the end of the connection. `WouldBlock` when nothing is
/// there, `InvalidData` for more than [`DESCRIPTORS_MAX`] descriptors.
///
/// For who expects descriptors: the client. The broker, to whom none are due,
/// reads without room for any, and the kernel throws them away.
pub fn receive(
    socket: impl AsFd,
    lines: &mut LineBuffer,
    descriptors: &mut Vec<OwnedFd>,
) -> io::Result<usize> {
    let mut bytes = [0; READ_BYTES];
    let mut received = Vec::new();
    // Room for as many as the kernel passes at a time: what is cut off for want
    // of room could not be told apart, and closed.
    let mut space = nix::cmsg_space!([RawFd; KERNEL_DESCRIPTORS_MAX]);
    let count = loop {
        let mut parts = [IoSliceMut::new(&mut bytes)];
        let message = match recvmsg::<()>(
            socket.as_fd().as_raw_fd(),
            &mut parts,
            Some(&mut space),
            MsgFlags::MSG_CMSG_CLOEXEC,
        ) {
            Err(Errno::EINTR) => continue,
            message => message?,
        };
        for part in message.cmsgs()? {
            if let ControlMessageOwned::ScmRights(numbers) = part {
                received.extend(numbers.into_iter().map(own));
            }
        }
        break message.bytes;
    };
    if received.len() > DESCRIPTORS_MAX {
        return Err(io::Error::new(
            io::ErrorKind::InvalidData,
            "more descriptors than a line can have",
        ));
    }
    descriptors.append(&mut received);
    lines.push(&bytes[..count]);
    Ok(count)
}

fn own(number: RawFd) -> OwnedFd {
    // SAFETY: the kernel has just made this descriptor for us in `recvmsg`, and
    // nobody else knows its number.
    unsafe { OwnedFd::from_raw_fd(number) }
}

/// Puts received bytes together to lines.
#[derive(Debug, Default)]
pub struct LineBuffer {
    bytes: Vec<u8>,
    /// There is no newline before this index.
    searched: usize,
}

impl LineBuffer {
    /// Empty.
    pub fn new() -> LineBuffer {
        LineBuffer::default()
    }

    /// Adds bytes as they came.
    pub fn push(&mut self, bytes: &[u8]) {
        self.bytes.extend_from_slice(bytes);
    }

    /// The next whole line, without its newline; `None` if there is none yet.
    /// [`Error::Corrupt`], and then always again, if the line is longer than
    /// [`LINE_BYTES_MAX`]: what holds this buffer in bounds is that its owner
    /// asks after each push.
    pub fn next_line(&mut self) -> Result<Option<Vec<u8>>> {
        let unsearched = &self.bytes[self.searched..];
        let end = unsearched.iter().position(|byte| *byte == b'\n');
        let length = end.map_or(self.bytes.len(), |end| self.searched + end) + 1;
        if length > LINE_BYTES_MAX {
            return Err(Error::Corrupt(format!(
                "a line of more than {LINE_BYTES_MAX} bytes on the socket"
            )));
        }
        if end.is_none() {
            self.searched = self.bytes.len();
            return Ok(None);
        }
        self.searched = 0;
        let mut line: Vec<u8> = self.bytes.drain(..length).collect();
        line.pop();
        Ok(Some(line))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::control::{PROTOCOL, Request};
    use std::fs::File;
    use std::io::{Read, Seek, Write};
    use std::os::unix::net::UnixStream;

    fn line(buffer: &mut LineBuffer) -> Option<String> {
        let line = buffer.next_line().expect("short enough")?;
        Some(String::from_utf8(line).expect("text"))
    }

    #[test]
    fn lines_come_whole_however_they_were_cut() {
        let mut buffer = LineBuffer::new();
        for byte in b"one\n\ntwo" {
            buffer.push(&[*byte]);
        }
        assert_eq!(line(&mut buffer).as_deref(), Some("one"));
        assert_eq!(line(&mut buffer).as_deref(), Some(""));
        assert_eq!(line(&mut buffer), None);
        buffer.push(b"\nthree\nfo");
        assert_eq!(line(&mut buffer).as_deref(), Some("two"));
        assert_eq!(line(&mut buffer).as_deref(), Some("three"));
        assert_eq!(line(&mut buffer), None);
    }

    #[test]
    fn a_line_at_the_limit_passes_and_one_past_it_does_not() {
        let mut buffer = LineBuffer::new();
        buffer.push(&vec![b'x'; LINE_BYTES_MAX - 1]);
        assert_eq!(line(&mut buffer), None);
        buffer.push(b"\n");
        assert_eq!(line(&mut buffer).map(|l| l.len()), Some(LINE_BYTES_MAX - 1));
        buffer.push(&vec![b'x'; LINE_BYTES_MAX]);
        for _ in 0..2 {
            assert!(matches!(buffer.next_line(), Err(Error::Corrupt(_))));
        }
    }

    #[test]
    fn what_is_encoded_is_one_line() {
        let line = encode(&Request::Hello { protocol: PROTOCOL }).expect("encodes");
        assert_eq!(line, b"{\"op\":\"hello\",\"protocol\":1}\n");
        let long = Request::QueueInfo {
            name: "x".repeat(LINE_BYTES_MAX),
        };
        assert!(matches!(encode(&long), Err(Error::Invalid(_))));
    }

    #[test]
    fn descriptors_arrive_in_order_and_are_closed_on_exec() {
        let (ours, theirs) = UnixStream::pair().expect("pair");
        let files: Vec<File> = (0..3u8)
            .map(|number| {
                let mut file = tempfile::tempfile().expect("file");
                file.write_all(&[number]).expect("write");
                file.rewind().expect("rewind");
                file
            })
            .collect();
        let descriptors: Vec<_> = files.iter().map(AsFd::as_fd).collect();
        assert_eq!(send(&ours, b"here\n", &descriptors).expect("sends"), 5);
        let (mut lines, mut received) = (LineBuffer::new(), Vec::new());
        assert_eq!(
            receive(&theirs, &mut lines, &mut received).expect("receives"),
            5
        );
        assert_eq!(line(&mut lines).as_deref(), Some("here"));
        for (number, descriptor) in (0..3u8).zip(received) {
            let flags = nix::fcntl::fcntl(&descriptor, nix::fcntl::FcntlArg::F_GETFD);
            assert_eq!(flags.expect("flags") & libc::FD_CLOEXEC, libc::FD_CLOEXEC);
            let mut byte = [9];
            File::from(descriptor).read_exact(&mut byte).expect("reads");
            assert_eq!(byte, [number]);
        }
    }

    #[test]
    fn too_many_descriptors_are_an_error() {
        let (ours, theirs) = UnixStream::pair().expect("pair");
        let file = tempfile::tempfile().expect("file");
        send(&ours, b"x\n", &[file.as_fd(); DESCRIPTORS_MAX + 9]).expect("sends");
        let mut received = Vec::new();
        let refused = receive(&theirs, &mut LineBuffer::new(), &mut received);
        assert_eq!(
            refused.expect_err("cut off").kind(),
            io::ErrorKind::InvalidData
        );
    }

    #[test]
    fn the_end_is_zero_bytes_and_sending_to_it_no_signal() {
        let (ours, theirs) = UnixStream::pair().expect("pair");
        drop(ours);
        let end = receive(&theirs, &mut LineBuffer::new(), &mut Vec::new());
        assert_eq!(end.expect("the end"), 0);
        let error = send(&theirs, b"x", &[]).expect_err("closed");
        assert_eq!(error.kind(), io::ErrorKind::BrokenPipe);
    }
}
