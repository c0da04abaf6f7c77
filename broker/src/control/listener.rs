//! The socket's file: made, replaced if stale, removed at the end.

use crate::crash::crash_point;
use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg};
use nix::sys::socket::{
    AddressFamily, Backlog, SockFlag, SockType, UnixAddr, bind, connect, listen, socket,
};
use std::fs::{DirBuilder, File, Permissions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{DirBuilderExt, FileTypeExt, MetadataExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Longest path of a unix socket: the kernel's `sun_path`, less its NUL.
const PATH_BYTES_MAX: usize = 107;

/// Why the control socket can't be had.
#[derive(Debug, thiserror::Error)]
pub enum ControlError {
    /// Another broker listens there.
    #[error("another broker is running at {}: stop it, or choose another --socket", socket.display())]
    InUse {
        /// The socket.
        socket: PathBuf,
    },
    /// The kernel takes no path of this length.
    #[error(
        "the socket's path has {} bytes, at most {PATH_BYTES_MAX} are possible: {}: choose a shorter one with --socket",
        socket.as_os_str().len(), socket.display()
    )]
    PathTooLong {
        /// The socket.
        socket: PathBuf,
    },
    /// Something else than a socket is in its place.
    #[error("{} exists and is no socket: remove it, or choose another --socket", socket.display())]
    NotASocket {
        /// The path.
        socket: PathBuf,
    },
    /// A call of the system failed on a file.
    #[error("{what} {}: {source}", path.display())]
    Io {
        /// What was tried.
        what: &'static str,
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// Another call of the system failed.
    #[error("{what}: {source}")]
    System {
        /// What was tried.
        what: &'static str,
        /// What the system said.
        source: io::Error,
    },
}

impl ControlError {
    pub(super) fn system(what: &'static str, errno: Errno) -> ControlError {
        ControlError::System {
            what,
            source: errno.into(),
        }
    }

    fn io(what: &'static str, path: &Path, source: impl Into<io::Error>) -> ControlError {
        ControlError::Io {
            what,
            path: path.to_owned(),
            source: source.into(),
        }
    }
}

/// A listening socket and its file.
#[derive(Debug)]
pub(super) struct Bound {
    listener: UnixListener,
    path: PathBuf,
    /// Device and inode of the file: what is removed must be ours.
    identity: (u64, u64),
}

impl Bound {
    pub(super) fn bind(path: &Path) -> Result<Bound, ControlError> {
        if path.as_os_str().len() > PATH_BYTES_MAX {
            return Err(ControlError::PathTooLong {
                socket: path.to_owned(),
            });
        }
        let address = UnixAddr::new(path)
            .map_err(|e| ControlError::io("cannot use the socket path", path, e))?;
        let folder = match path.parent() {
            Some(parent) if !parent.as_os_str().is_empty() => parent,
            _ => Path::new("."),
        };
        crash_point("make the socket's folder");
        DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(folder)
            .map_err(|e| ControlError::io("cannot make the folder", folder, e))?;

        // From the look at the old file until the new one listens: two brokers
        // that start together would else replace each other's.
        let _lock = lock_folder(folder)?;
        clear_place(path, &address)?;

        let fd = socket(
            AddressFamily::Unix,
            SockType::Stream,
            SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK,
            None,
        )
        .map_err(|e| ControlError::system("cannot make a socket", e))?;
        crash_point("bind the socket");
        bind(fd.as_raw_fd(), &address)
            .map_err(|e| ControlError::io("cannot make the socket", path, e))?;
        crash_point("protect the socket");
        // Nobody can have connected: it does not listen yet.
        std::fs::set_permissions(path, Permissions::from_mode(0o600))
            .map_err(|e| ControlError::io("cannot protect the socket", path, e))?;
        crash_point("listen");
        listen(&fd, Backlog::MAXCONN).map_err(|e| ControlError::io("cannot listen at", path, e))?;
        let identity =
            identity(path).map_err(|e| ControlError::io("cannot look at the socket", path, e))?;
        Ok(Bound {
            listener: fd.into(),
            path: path.to_owned(),
            identity,
        })
    }

    pub(super) fn listener(&self) -> &UnixListener {
        &self.listener
    }

    /// Takes a waiting connection, set not to block.
    pub(super) fn accept(&self) -> io::Result<UnixStream> {
        let (stream, _) = self.listener.accept()?;
        stream.set_nonblocking(true)?;
        Ok(stream)
    }
}

impl Drop for Bound {
    fn drop(&mut self) {
        if identity(&self.path).is_ok_and(|found| found == self.identity) {
            crash_point("remove the socket");
            // If it stays, the next broker takes it for stale, which it is.
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

fn identity(path: &Path) -> io::Result<(u64, u64)> {
    let metadata = std::fs::symlink_metadata(path)?;
    Ok((metadata.dev(), metadata.ino()))
}

/// Locks the folder against other starting brokers. It is held for a moment, so
/// a lock that stays is somebody else's, and is waited for a second.
fn lock_folder(folder: &Path) -> Result<Flock<File>, ControlError> {
    let mut file =
        File::open(folder).map_err(|e| ControlError::io("cannot open the folder", folder, e))?;
    let mut tries_left = 50;
    loop {
        file = match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
            Ok(lock) => return Ok(lock),
            Err((file, Errno::EWOULDBLOCK | Errno::EINTR)) if tries_left > 0 => file,
            Err((_, e)) => return Err(ControlError::io("cannot lock the folder", folder, e)),
        };
        tries_left -= 1;
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Removes a socket file at which nobody listens. Any other is an error.
fn clear_place(path: &Path, address: &UnixAddr) -> Result<(), ControlError> {
    match std::fs::symlink_metadata(path) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(e) => return Err(ControlError::io("cannot look at", path, e)),
        Ok(metadata) if !metadata.file_type().is_socket() => {
            return Err(ControlError::NotASocket {
                socket: path.to_owned(),
            });
        }
        Ok(_) => {}
    }
    let probe = socket(
        AddressFamily::Unix,
        SockType::Stream,
        SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK,
        None,
    )
    .map_err(|e| ControlError::system("cannot make a socket", e))?;
    match connect(probe.as_raw_fd(), address) {
        // A broker with a full backlog says EAGAIN: it lives.
        Ok(()) | Err(Errno::EAGAIN) => Err(ControlError::InUse {
            socket: path.to_owned(),
        }),
        Err(Errno::ECONNREFUSED) => {
            crash_point("remove a stale socket");
            std::fs::remove_file(path)
                .map_err(|e| ControlError::io("cannot remove the stale socket", path, e))
        }
        Err(Errno::ENOENT) => Ok(()),
        Err(e) => Err(ControlError::io("cannot use the socket", path, e)),
    }
}
