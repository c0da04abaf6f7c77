//! `ringmain version`.

use super::exit::Failure;
use super::output;
use ringmain::control::PROTOCOL;
use ringmain_ring::layout::LAYOUT_VERSION;
use serde::Serialize;

/// Print the version
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  ringmain version --json")]
pub(super) struct Args {
    /// Print it as JSON
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Serialize)]
struct Version {
    version: &'static str,
    protocol: u32,
    layout: u32,
}

pub(super) fn run(args: &Args) -> Result<(), Failure> {
    let version = Version {
        version: env!("CARGO_PKG_VERSION"),
        protocol: PROTOCOL,
        layout: LAYOUT_VERSION,
    };
    if args.json {
        return output::json(&version);
    }
    output::line(&format!(
        "ringmain {} (control protocol {}, memory layout {})",
        version.version, version.protocol, version.layout
    ))
}
