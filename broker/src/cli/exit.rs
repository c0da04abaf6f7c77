//! What the program ends with: a code that scripts can use, and one line.

use ringmain::ErrorCode;
use std::io::{self, Write};
use std::process::ExitCode;

/// Something went wrong that has no code of its own.
pub(super) const FAILED: u8 = 1;
/// The arguments make no sense. Clap uses the same.
pub(super) const USAGE: u8 = 2;
/// No broker is there.
pub(super) const NOT_RUNNING: u8 = 3;
const NO_SUCH_QUEUE: u8 = 4;
/// The time was over first.
pub(super) const TIMED_OUT: u8 = 5;
const NOT_PERMITTED: u8 = 6;
/// A message was not taken.
pub(super) const REFUSED: u8 = 7;
/// Another version's broker, client, shared memory or store. Trying again is of
/// no use, so that a service manager can be told not to.
pub(super) const OTHER_VERSION: u8 = 8;

/// The table for `--help`.
pub(super) const EXIT_CODES: &str = "\
Exit codes:
  0    done
  1    failed
  2    wrong usage, or an invalid name or setting
  3    no broker is running
  4    no such queue
  5    timed out: nothing there, or less than asked for
  6    not permitted
  7    a message was not taken: too large, full, or refused
  8    made by another version of ringmain: the message says what to do
  123  some commands of `ringmain work` failed
  130  ended by Ctrl-C (SIGINT)
  143  ended by SIGTERM";

/// Why the program ends without having done all.
#[derive(Debug)]
pub(super) struct Failure {
    code: u8,
    /// For people, on standard error; `None` if there is nothing to say.
    message: Option<String>,
}

impl Failure {
    pub(super) fn new(code: u8, message: impl Into<String>) -> Failure {
        Failure {
            code,
            message: Some(message.into()),
        }
    }

    /// Ends with this code, and says nothing.
    pub(super) fn silent(code: u8) -> Failure {
        Failure {
            code,
            message: None,
        }
    }

    /// A call of the system failed.
    pub(super) fn io(what: impl std::fmt::Display, error: &io::Error) -> Failure {
        Failure::new(FAILED, format!("{what}: {error}"))
    }

    /// The same with more said.
    pub(super) fn and(self, more: &str) -> Failure {
        let message = match self.message {
            Some(message) => format!("{message}; {more}"),
            None => more.to_owned(),
        };
        Failure::new(self.code, message)
    }

    /// What it says to people.
    pub(super) fn text(&self) -> &str {
        self.message.as_deref().unwrap_or_default()
    }

    /// Prints the line, and gives the code.
    pub(super) fn report(self) -> ExitCode {
        if let Some(message) = &self.message {
            let message = message.replace('\n', " ");
            // If nobody reads it, the code still tells.
            let _ = writeln!(io::stderr(), "ringmain: {message}");
        }
        ExitCode::from(self.code)
    }

    #[cfg(test)]
    pub(super) fn code(&self) -> u8 {
        self.code
    }
}

impl From<ringmain::Error> for Failure {
    fn from(error: ringmain::Error) -> Failure {
        let code = match error.code() {
            ErrorCode::NotRunning => NOT_RUNNING,
            ErrorCode::NoSuchQueue => NO_SUCH_QUEUE,
            ErrorCode::TimedOut => TIMED_OUT,
            ErrorCode::NotPermitted => NOT_PERMITTED,
            ErrorCode::TooLarge | ErrorCode::Full | ErrorCode::Refused => REFUSED,
            ErrorCode::Invalid => USAGE,
            ErrorCode::VersionMismatch => OTHER_VERSION,
            _ => FAILED,
        };
        Failure::new(code, error.to_string())
    }
}
