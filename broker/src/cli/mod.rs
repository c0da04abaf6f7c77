//! The command line: one file a command, each with its arguments and what it
//! does with them.

mod demo;
mod dlq;
mod exit;
mod interrupt;
mod logging;
mod output;
mod progress;
mod queue;
mod recv;
mod send;
mod serve;
mod stats;
mod status;
mod stop;
mod top;
mod units;
mod version;
mod work;

use clap::{Parser, Subcommand};
use exit::{EXIT_CODES, Failure, TIMED_OUT};
use ringmain::{Broker, Client, Error, paths};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

const EXAMPLE: &str = "\
Example:
  ringmain serve &
  ringmain queue create jobs
  find /usr -type f | ringmain send jobs
  ringmain recv jobs --count 10 --ack";

/// A durable message broker for the processes of one Linux machine.
///
/// Start a broker with `ringmain serve`, or see it all at work with
/// `ringmain demo`.
#[derive(Debug, Parser)]
#[command(
    name = "ringmain",
    version,
    propagate_version = false,
    arg_required_else_help = true,
    after_help = format!("{EXAMPLE}\n\n{EXIT_CODES}"),
)]
struct Cli {
    #[command(flatten)]
    global: Global,
    #[command(subcommand)]
    command: Command,
}

/// What every command takes.
#[derive(Debug, clap::Args)]
struct Global {
    /// The broker's socket [default: ringmain/ringmain.sock in the user's
    /// runtime folder]
    #[arg(long, global = true, env = paths::SOCKET_VARIABLE, value_name = "PATH")]
    socket: Option<PathBuf>,
}

impl Global {
    fn socket(&self) -> PathBuf {
        self.socket.clone().unwrap_or_else(paths::default_socket)
    }

    fn connect(&self) -> Result<Client, Failure> {
        match &self.socket {
            Some(socket) => Ok(Client::connect_to(socket)?),
            // It checks also that the default place is safe.
            None => Ok(Client::connect()?),
        }
    }

    /// The running broker, of whatever version, if it answers in this time.
    fn broker(&self, timeout: Duration) -> Result<Broker, Failure> {
        let socket = self.socket();
        if self.socket.is_none() {
            paths::check_socket_folder(&socket)?;
        }
        match Broker::at_timeout(&socket, timeout) {
            Err(Error::TimedOut) => Err(Failure::new(
                TIMED_OUT,
                format!(
                    "timed out: the broker at {} does not answer",
                    socket.display()
                ),
            )),
            broker => Ok(broker?),
        }
    }
}

#[derive(Debug, Subcommand)]
enum Command {
    Serve(serve::Args),
    Stop(stop::Args),
    Queue(queue::Args),
    Send(send::Args),
    Recv(recv::Args),
    Dlq(dlq::Args),
    Stats(stats::Args),
    Top(top::Args),
    Demo(demo::Args),
    Version(version::Args),
    Work(work::Args),
    /// A process of the demo; started by it alone.
    #[command(hide = true)]
    DemoRole(demo::RoleArgs),
}

/// Does what the arguments say, and returns what the program ends with.
pub fn main() -> ExitCode {
    let cli = Cli::parse();
    let outcome = match &cli.command {
        Command::Serve(args) => serve::run(&cli.global, args),
        Command::Stop(args) => stop::run(&cli.global, args),
        Command::Queue(args) => queue::run(&cli.global, args),
        Command::Send(args) => send::run(&cli.global, args),
        Command::Recv(args) => recv::run(&cli.global, args),
        Command::Dlq(args) => dlq::run(&cli.global, args),
        Command::Stats(args) => stats::run(&cli.global, args),
        Command::Top(args) => top::run(&cli.global, args),
        Command::Demo(args) => demo::run(args),
        Command::Work(args) => work::run(&cli.global, args),
        Command::Version(args) => version::run(&cli.global, args),
        Command::DemoRole(args) => demo::run_role(args),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => failure.report(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_arguments_are_sound() {
        Cli::command().debug_assert();
    }

    #[test]
    fn every_command_has_an_example() {
        fn check(command: &clap::Command) {
            for sub in command.get_subcommands().filter(|c| !c.is_hide_set()) {
                let help = sub.clone().render_long_help().to_string();
                assert!(help.contains("Example"), "{}", sub.get_name());
                check(sub);
            }
        }
        check(&Cli::command());
    }
}
