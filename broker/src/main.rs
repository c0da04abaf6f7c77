//! The `ringmain` program: the broker, and the commands to use it by hand.

mod cli;

use std::process::ExitCode;

fn main() -> ExitCode {
    cli::main()
}
