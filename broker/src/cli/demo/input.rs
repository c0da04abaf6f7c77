//! The texts that are sent: names of files, or a file's lines. They are written
//! to a file of the demo's, each with its length, which producers read again and
//! again.

use super::message::HEAD_BYTES;
use crate::cli::exit::{FAILED, Failure, USAGE};
use ringmain::record::INLINE_BYTES_MAX;
use std::fs::File;
use std::io::{self, BufRead, BufReader, BufWriter, Read, Seek, Write};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

/// Where names are taken from by default.
const FOLDER: &str = "/usr";

/// Writes up to `count` texts to `target`. Returns what they are.
pub(super) fn prepare(input: Option<&Path>, target: &Path, count: u64) -> Result<String, Failure> {
    let mut writer = Writer {
        file: BufWriter::new(File::create(target).map_err(|e| Failure::io(target.display(), &e))?),
        written: 0,
        count,
    };
    let source = match input {
        Some(path) => {
            lines(path, &mut writer)?;
            format!("lines of {}", path.display())
        }
        None => {
            names(Path::new(FOLDER), &mut writer)?;
            format!("file names under {FOLDER}")
        }
    };
    writer
        .file
        .flush()
        .map_err(|e| Failure::io(target.display(), &e))?;
    match writer.written {
        0 => Err(Failure::new(FAILED, format!("there are no {source}"))),
        written => Ok(format!("{written} {source}")),
    }
}

struct Writer {
    file: BufWriter<File>,
    written: u64,
    count: u64,
}

impl Writer {
    fn is_full(&self) -> bool {
        self.written >= self.count
    }

    fn put(&mut self, text: &[u8]) -> Result<(), Failure> {
        let limit = INLINE_BYTES_MAX as usize - HEAD_BYTES;
        if text.len() > limit {
            let message = format!(
                "line {} has {} bytes, the demo takes up to {limit}",
                self.written + 1,
                text.len()
            );
            return Err(Failure::new(USAGE, message));
        }
        self.written += 1;
        self.file
            .write_all(&(text.len() as u32).to_le_bytes())
            .and_then(|()| self.file.write_all(text))
            .map_err(|e| Failure::io("cannot write the demo's input", &e))
    }
}

fn lines(path: &Path, writer: &mut Writer) -> Result<(), Failure> {
    let failure = |e| Failure::io(format_args!("cannot read {}", path.display()), &e);
    let mut reader = BufReader::new(File::open(path).map_err(failure)?);
    let mut line = Vec::new();
    while !writer.is_full() && reader.read_until(b'\n', &mut line).map_err(failure)? > 0 {
        let text = line.strip_suffix(b"\n").unwrap_or(&line);
        writer.put(text)?;
        line.clear();
    }
    Ok(())
}

/// Files below the folder. What can't be read is passed over.
fn names(folder: &Path, writer: &mut Writer) -> Result<(), Failure> {
    let mut folders: Vec<PathBuf> = vec![folder.to_owned()];
    while let Some(folder) = folders.pop() {
        let Ok(entries) = std::fs::read_dir(&folder) else {
            continue;
        };
        for entry in entries.flatten() {
            if writer.is_full() {
                return Ok(());
            }
            // Not of what a link points to: that way lie circles.
            match entry.file_type() {
                Ok(kind) if kind.is_dir() => folders.push(entry.path()),
                Ok(_) => writer.put(entry.path().as_os_str().as_bytes())?,
                Err(_) => {}
            }
        }
    }
    Ok(())
}

/// Reads the texts in a circle.
#[derive(Debug)]
pub(super) struct Texts {
    file: BufReader<File>,
}

impl Texts {
    pub(super) fn open(path: &Path) -> io::Result<Texts> {
        Ok(Texts {
            file: BufReader::with_capacity(64 * 1024, File::open(path)?),
        })
    }

    /// Puts the next text into `text`, in place of what is there.
    pub(super) fn next(&mut self, text: &mut Vec<u8>) -> io::Result<()> {
        if self.file.fill_buf()?.is_empty() {
            self.file.rewind()?;
        }
        let mut length = [0; 4];
        self.file.read_exact(&mut length)?;
        text.resize(u32::from_le_bytes(length) as usize, 0);
        self.file.read_exact(text)
    }

    /// Passes over so many texts.
    pub(super) fn skip(&mut self, count: u64) -> io::Result<()> {
        let mut text = Vec::new();
        for _ in 0..count {
            self.next(&mut text)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_come_round() {
        let folder = tempfile::tempdir().expect("a folder");
        let (source, target) = (folder.path().join("source"), folder.path().join("target"));
        std::fs::write(&source, "one\n\nthree").expect("write");
        let what = prepare(Some(&source), &target, 100).expect("prepare");
        assert!(what.starts_with("3 lines of "));
        let mut texts = Texts::open(&target).expect("open");
        texts.skip(1).expect("skip");
        let mut text = Vec::new();
        for expected in [&b""[..], b"three", b"one", b""] {
            texts.next(&mut text).expect("next");
            assert_eq!(text, expected);
        }
    }

    #[test]
    fn input_that_is_empty_or_missing_or_too_long_is_an_error() {
        let folder = tempfile::tempdir().expect("a folder");
        let (source, target) = (folder.path().join("source"), folder.path().join("target"));
        assert!(prepare(Some(&source), &target, 1).is_err());
        std::fs::write(&source, "").expect("write");
        assert!(prepare(Some(&source), &target, 1).is_err());
        std::fs::write(&source, "x".repeat(20_000)).expect("write");
        assert!(prepare(Some(&source), &target, 1).is_err());
    }
}
