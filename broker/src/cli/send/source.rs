//! Where messages come from: lines, files, or thin air.

use super::batch::Batch;
use crate::cli::exit::{Failure, REFUSED};
use crate::cli::interrupt::Interrupt;
use std::fs::File;
use std::io::{self, BufRead, BufReader, Read};
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};

/// Messages, one after the other, none longer than the queue takes.
#[derive(Debug)]
pub(super) enum Source {
    Lines(Lines<File>),
    Files {
        left: std::vec::IntoIter<PathBuf>,
        limit: u64,
    },
    Load {
        next: u64,
        count: u64,
        size: usize,
    },
}

/// Whether there is more to come.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Next {
    More,
    End,
}

impl Source {
    /// Standard input, by lines.
    pub(super) fn lines(separator: u8, limit: u64) -> Result<Source, Failure> {
        let input = io::stdin().as_fd().try_clone_to_owned();
        let input = input.map_err(|e| Failure::io("cannot read standard input", &e))?;
        Ok(Source::Lines(Lines::new(input.into(), separator, limit)))
    }

    /// Each file as one message.
    pub(super) fn files(files: Vec<PathBuf>, limit: u64) -> Source {
        let left = files.into_iter();
        Source::Files { left, limit }
    }

    /// So many messages of this length, made up.
    pub(super) fn load(count: u64, bytes: u64, limit: u64) -> Result<Source, Failure> {
        match usize::try_from(bytes) {
            Ok(size) if bytes <= limit => Ok(Source::Load {
                next: 0,
                count,
                size,
            }),
            _ => Err(too_long(&format!("a message of {bytes} bytes"), limit)),
        }
    }

    /// How many messages there are, if that is known.
    pub(super) fn total(&self) -> Option<u64> {
        match self {
            Source::Lines(_) => None,
            Source::Files { left, .. } => Some(left.len() as u64),
            Source::Load { count, .. } => Some(*count),
        }
    }

    /// Adds messages to the batch, as many as are there without waiting, and
    /// waits for the first if need be. Also when this is an error, the batch
    /// has what came before it.
    pub(super) fn next(
        &mut self,
        batch: &mut Batch,
        interrupt: &Interrupt,
    ) -> Result<Next, Failure> {
        interrupt.check()?;
        match self {
            Source::Lines(lines) => lines.next(batch, |input| interrupt.wait_readable(input)),
            Source::Files { left, limit } => {
                while !batch.is_full() {
                    let Some(path) = left.next() else {
                        return Ok(Next::End);
                    };
                    batch.push(&read_file(&path, *limit)?);
                }
                Ok(Next::More)
            }
            Source::Load { next, count, size } => {
                while !batch.is_full() {
                    if *next == *count {
                        return Ok(Next::End);
                    }
                    *next += 1;
                    batch.push(&made_up(*next, *size));
                }
                Ok(Next::More)
            }
        }
    }
}

fn too_long(what: &str, limit: u64) -> Failure {
    let text = format!(
        "{what} is longer than the {limit} bytes that the queue takes: \
         see `ringmain queue create --max-message-size`"
    );
    Failure::new(REFUSED, text)
}

fn made_up(number: u64, size: usize) -> Vec<u8> {
    let mut message = format!("message {number} ").into_bytes();
    message.resize(size, b'.');
    message
}

fn read_file(path: &Path, limit: u64) -> Result<Vec<u8>, Failure> {
    let mut payload = Vec::new();
    let failure = |e| Failure::io(format_args!("cannot read {}", path.display()), &e);
    let file = File::open(path).map_err(failure)?;
    file.take(limit + 1)
        .read_to_end(&mut payload)
        .map_err(failure)?;
    if payload.len() as u64 > limit {
        return Err(too_long(&format!("{}", path.display()), limit));
    }
    Ok(payload)
}

/// Messages that end with a separator; the last one may lack it.
#[derive(Debug)]
pub(super) struct Lines<R> {
    input: BufReader<R>,
    separator: u8,
    limit: u64,
    /// The beginning of a line whose end was not read yet.
    partial: Vec<u8>,
    number: u64,
}

impl<R: Read> Lines<R> {
    fn new(input: R, separator: u8, limit: u64) -> Lines<R> {
        Lines {
            input: BufReader::with_capacity(64 * 1024, input),
            separator,
            limit,
            partial: Vec::new(),
            number: 0,
        }
    }

    /// `wait` waits for input, and says `false` if a signal came first.
    fn next(
        &mut self,
        batch: &mut Batch,
        wait: impl Fn(&R) -> io::Result<bool>,
    ) -> Result<Next, Failure> {
        let failure = |e| Failure::io("cannot read standard input", &e);
        while !batch.is_full() {
            if self.input.buffer().is_empty() {
                if !batch.is_empty() {
                    break;
                }
                if !wait(self.input.get_ref()).map_err(failure)? {
                    break;
                }
            }
            let available = match self.input.fill_buf() {
                Ok(available) => available,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => continue,
                Err(e) => return Err(failure(e)),
            };
            if available.is_empty() {
                if !self.partial.is_empty() {
                    batch.push(&self.partial);
                    self.partial.clear();
                }
                return Ok(Next::End);
            }
            let end = available.iter().position(|&byte| byte == self.separator);
            let piece = &available[..end.unwrap_or(available.len())];
            if (self.partial.len() + piece.len()) as u64 > self.limit {
                let what = match self.separator {
                    b'\n' => format!("line {}", self.number + 1),
                    _ => format!("message {}", self.number + 1),
                };
                return Err(too_long(&what, self.limit));
            }
            let consumed = piece.len() + usize::from(end.is_some());
            match (end, self.partial.is_empty()) {
                (Some(_), true) => batch.push(piece),
                _ => self.partial.extend_from_slice(piece),
            }
            if end.is_some() {
                if !self.partial.is_empty() {
                    batch.push(&self.partial);
                    self.partial.clear();
                }
                self.number += 1;
            }
            self.input.consume(consumed);
        }
        Ok(Next::More)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read_all(input: &[u8], separator: u8, limit: u64) -> (Vec<Vec<u8>>, Option<Failure>) {
        let mut lines = Lines::new(input, separator, limit);
        let mut batch = Batch::default();
        let mut all = Vec::new();
        loop {
            let next = lines.next(&mut batch, |_| Ok(true));
            all.extend(batch.messages().map(<[u8]>::to_vec));
            batch.clear();
            match next {
                Ok(Next::More) => {}
                Ok(Next::End) => return (all, None),
                Err(failure) => return (all, Some(failure)),
            }
        }
    }

    #[test]
    fn lines_are_messages_and_the_last_needs_no_newline() {
        let (all, _) = read_all(b"one\n\nthr\xffee", b'\n', 100);
        assert_eq!(all, [&b"one"[..], b"", b"thr\xffee"]);
        assert!(read_all(b"", b'\n', 100).0.is_empty());
        assert_eq!(read_all(b"a\nb\0c\0", 0, 100).0, [&b"a\nb"[..], b"c"]);
    }

    #[test]
    fn a_line_over_the_limit_is_named_and_those_before_it_come_out() {
        let (all, failure) = read_all(b"12345\n123456\n1\n", b'\n', 5);
        assert_eq!(all, [b"12345"]);
        let failure = failure.map(|f| (f.code(), format!("{f:?}")));
        assert!(failure.is_some_and(|(code, text)| code == REFUSED && text.contains("line 2")));
    }

    #[test]
    fn lines_longer_than_a_buffer_are_whole() {
        let long = vec![b'x'; 200_000];
        let mut input = long.clone();
        input.extend_from_slice(b"\nshort\n");
        let (all, _) = read_all(&input, b'\n', 1 << 20);
        assert_eq!(all, [long, b"short".to_vec()]);
    }

    #[test]
    fn made_up_messages_have_the_length_asked_for() {
        for size in [0, 1, 12, 1000] {
            assert_eq!(made_up(7, size).len(), size);
        }
    }
}
