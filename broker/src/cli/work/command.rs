//! The command of one message: its arguments, and the process.

use super::super::exit::{Failure, USAGE};
use nix::sys::signal::{Signal, killpg};
use nix::unistd::Pid;
use std::ffi::{OsStr, OsString};
use std::io::{self, Read, Write};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::OnceLock;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use tempfile::NamedTempFile;

/// Between SIGTERM and SIGKILL.
const GRACE: Duration = Duration::from_secs(5);
/// Between two looks whether a command has ended. It is waited for by a thread
/// that has to look at the time and at signals, too.
const LOOK: Duration = Duration::from_millis(5);

/// How the payload gets to the command.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Way {
    Argument,
    Stdin,
    File,
}

/// What is run for each message.
#[derive(Debug)]
pub(super) struct Template {
    program: OsString,
    arguments: Vec<OsString>,
    way: Way,
    /// Why no command can be started, ever.
    broken: OnceLock<String>,
}

impl Template {
    pub(super) fn new(command: &[OsString], stdin: bool, file: bool) -> Result<Template, Failure> {
        let Some((program, arguments)) = command.split_first() else {
            return Err(Failure::new(USAGE, "no command"));
        };
        let mut arguments = arguments.to_vec();
        let way = match (stdin, file) {
            (true, _) => Way::Stdin,
            (_, true) => Way::File,
            _ => Way::Argument,
        };
        let named = |argument: &OsString| has_place(argument.as_bytes());
        if way != Way::Stdin && !arguments.iter().any(named) {
            arguments.push("{}".into());
        }
        Ok(Template {
            program: program.clone(),
            arguments,
            way,
            broken: OnceLock::new(),
        })
    }

    /// Why no command can be started at all, if that has turned out.
    pub(super) fn broken(&self) -> Option<String> {
        self.broken.get().cloned()
    }

    /// Starts the command with this payload and these variables.
    pub(super) fn start(
        &self,
        payload: &[u8],
        variables: &[(&str, String)],
    ) -> Result<Running, String> {
        let mut file = None;
        let mut command = Command::new(&self.program);
        match self.way {
            Way::Argument => {
                if payload.contains(&0) {
                    return Err(
                        "its payload has a NUL byte, which no argument can have: use --stdin or --file"
                            .to_owned(),
                    );
                }
                self.add_arguments(&mut command, payload);
            }
            Way::Stdin => {
                command.args(&self.arguments);
            }
            Way::File => {
                let written =
                    in_file(payload).map_err(|e| format!("cannot write its file: {e}"))?;
                self.add_arguments(&mut command, written.path().as_os_str().as_bytes());
                file = Some(written);
            }
        }
        command
            .envs(variables.iter().map(|(name, value)| (name, value)))
            .stdin(if self.way == Way::Stdin {
                Stdio::piped()
            } else {
                Stdio::null()
            })
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            // Ctrl-C on the terminal is for the worker.
            .process_group(0);
        end_with_parent(&mut command);
        let mut child = command.spawn().map_err(|error| self.not_started(&error))?;
        let stdin = match (self.way, child.stdin.take()) {
            (Way::Stdin, Some(pipe)) => Some(feed(pipe, payload.to_vec())),
            _ => None,
        };
        Ok(Running {
            output: child.stdout.take().map(drain),
            errors: child.stderr.take().map(drain),
            _stdin: stdin,
            _file: file,
            child,
        })
    }

    fn add_arguments(&self, command: &mut Command, value: &[u8]) {
        for argument in &self.arguments {
            command.arg(filled(argument, value));
        }
    }

    fn not_started(&self, error: &io::Error) -> String {
        let program = self.program.display();
        if error.raw_os_error() == Some(libc::E2BIG) {
            return "its payload is too long for an argument: use --stdin or --file".to_owned();
        }
        let text = format!("cannot start {program}: {error}");
        // The next message would fare no better.
        if matches!(
            error.kind(),
            io::ErrorKind::NotFound | io::ErrorKind::PermissionDenied
        ) {
            self.broken.get_or_init(|| text.clone());
        }
        text
    }
}

fn has_place(argument: &[u8]) -> bool {
    argument.windows(2).any(|pair| pair == b"{}")
}

/// The argument with the value at each `{}`.
fn filled(argument: &OsStr, value: &[u8]) -> OsString {
    let mut rest = argument.as_bytes();
    let mut bytes = Vec::with_capacity(rest.len() + value.len());
    while let Some(at) = rest.windows(2).position(|pair| pair == b"{}") {
        bytes.extend_from_slice(&rest[..at]);
        bytes.extend_from_slice(value);
        rest = &rest[at + 2..];
    }
    bytes.extend_from_slice(rest);
    OsString::from_vec(bytes)
}

fn in_file(payload: &[u8]) -> io::Result<NamedTempFile> {
    let mut file = tempfile::Builder::new().prefix("ringmain-").tempfile()?;
    file.write_all(payload)?;
    file.flush()?;
    Ok(file)
}

/// A command does not outlive its worker, whose message goes to another one.
fn end_with_parent(command: &mut Command) {
    let worker = std::process::id() as libc::pid_t;
    let set_up = move || {
        // SAFETY: the call takes numbers alone.
        if unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGTERM) } != 0 {
            return Err(io::Error::last_os_error());
        }
        // It may have died before that.
        if nix::unistd::getppid().as_raw() != worker {
            return Err(io::Error::from(io::ErrorKind::BrokenPipe));
        }
        Ok(())
    };
    // SAFETY: between fork and exec it only makes two system calls, which is
    // allowed there.
    unsafe { command.pre_exec(set_up) };
}

/// Writes the payload from a thread of its own: the command may print before it
/// has read all.
fn feed(mut pipe: impl Write + Send + 'static, payload: Vec<u8>) -> JoinHandle<()> {
    std::thread::spawn(move || {
        // A command need not read its input; its exit code tells.
        let _ = pipe.write_all(&payload);
    })
}

fn drain(mut pipe: impl Read + Send + 'static) -> JoinHandle<Vec<u8>> {
    std::thread::spawn(move || {
        let mut bytes = Vec::new();
        // What came before an error is shown.
        let _ = pipe.read_to_end(&mut bytes);
        bytes
    })
}

/// A command that runs.
pub(super) struct Running {
    child: Child,
    output: Option<JoinHandle<Vec<u8>>>,
    errors: Option<JoinHandle<Vec<u8>>>,
    _stdin: Option<JoinHandle<()>>,
    /// Removed when the command has ended.
    _file: Option<NamedTempFile>,
}

/// What a command has come to.
pub(super) struct Ended {
    pub status: ExitStatus,
    pub output: Vec<u8>,
    pub errors: Vec<u8>,
}

impl Running {
    /// Waits for the command, and calls `meanwhile` every few milliseconds, which
    /// says whether it is to be ended.
    pub(super) fn wait(mut self, mut meanwhile: impl FnMut() -> bool) -> io::Result<Ended> {
        let mut ended_at = None;
        let status = loop {
            if let Some(status) = self.child.try_wait()? {
                break status;
            }
            match ended_at {
                None if meanwhile() => {
                    self.signal(Signal::SIGTERM);
                    ended_at = Some(Instant::now());
                }
                Some(when) if when.elapsed() > GRACE => self.signal(Signal::SIGKILL),
                _ => {}
            }
            std::thread::sleep(LOOK);
        };
        let joined = |reader: Option<JoinHandle<Vec<u8>>>| {
            reader
                .and_then(|reader| reader.join().ok())
                .unwrap_or_default()
        };
        Ok(Ended {
            status,
            output: joined(self.output),
            errors: joined(self.errors),
        })
    }

    fn signal(&self, signal: Signal) {
        // It fails if all of the group have just ended.
        let _ = killpg(Pid::from_raw(self.child.id() as i32), signal);
    }
}

/// How a command ended, for people; `None`: well.
pub(super) fn failure(status: ExitStatus) -> Option<String> {
    match (status.code(), status.signal()) {
        (Some(0), _) => None,
        (Some(code), _) => Some(format!("ended with exit code {code}")),
        (None, Some(signal)) => Some(format!("was ended by signal {signal}")),
        (None, None) => Some("ended in an unknown way".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_payload_takes_every_place() {
        let filled = |argument: &str| filled(OsStr::new(argument), b"a b");
        assert_eq!(filled("{}"), "a b");
        assert_eq!(filled("x{}y{}"), "xa bya b");
        assert_eq!(filled("{ }{"), "{ }{");
    }

    #[test]
    fn without_a_place_the_payload_is_the_last_argument() {
        let template = |stdin, file| {
            let command: Vec<OsString> = vec!["echo".into(), "-n".into()];
            let template = Template::new(&command, stdin, file).expect("a command");
            template.arguments
        };
        assert_eq!(template(false, false), ["-n", "{}"]);
        assert_eq!(template(false, true), ["-n", "{}"]);
        assert_eq!(template(true, false), ["-n"]);
    }
}
