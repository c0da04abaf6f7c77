//! Runs the commands of a guide as its reader would.

use super::{Broker, PROGRAM};
use std::path::Path;
use std::process::Command;

/// Runs every `sh` block of the guide (a path from the repository's root), in
/// order, with one shell in a folder of its own, `ringmain` on the path and a
/// broker behind it. Each command must succeed, as the text promises. Returns what
/// was printed.
#[track_caller]
pub fn run(guide: &str) -> String {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let text = std::fs::read_to_string(root.join(guide)).unwrap();
    let script = blocks(&text);
    assert!(!script.is_empty(), "{guide} has no commands");
    let broker = Broker::start();
    let folder = tempfile::tempdir().unwrap();
    let programs = Path::new(PROGRAM).parent().unwrap();
    let path = std::env::var("PATH").unwrap_or_default();
    let mut command = Command::new("bash");
    command
        .args(["-e", "-o", "pipefail", "-c", &script])
        .current_dir(folder.path())
        .env("PATH", format!("{}:{path}", programs.display()))
        .env("RINGMAIN_SOCKET", broker.socket());
    let output = super::dies_with_us(&mut command).output().unwrap();
    let printed = String::from_utf8_lossy(&output.stdout).into_owned();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(
        output.status.success(),
        "{guide}: {}\n{printed}{errors}",
        output.status
    );
    printed
}

/// What lies between "```sh" and "```".
fn blocks(text: &str) -> String {
    let mut script = String::new();
    let mut inside = false;
    for line in text.lines() {
        match line.trim_end() {
            "```sh" => inside = true,
            "```" => inside = false,
            line if inside => {
                script.push_str(line);
                script.push('\n');
            }
            _ => {}
        }
    }
    script
}
