//! `ringmain version`.

use super::Global;
use super::exit::Failure;
use super::output;
use ringmain::control::{Hello, PROTOCOL};
use ringmain_broker::store::rocks::{FORMAT, ROCKSDB_VERSION};
use ringmain_ring::layout::LAYOUT_VERSION;
use serde::Serialize;
use std::time::Duration;

/// How long a running broker has to answer.
const PATIENCE: Duration = Duration::from_secs(2);

/// Print the version
///
/// With --verbose also what decides whether two versions go together: the control
/// protocol, the layout of shared memory and the format of the store; and the same
/// of the running broker, if there is one at the socket.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  ringmain version --verbose --json | jq .broker.version")]
pub(super) struct Args {
    /// Print more, also of the running broker
    #[arg(long, short)]
    verbose: bool,
    /// Print it as JSON
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Serialize)]
struct Version {
    version: &'static str,
    protocol: u32,
    layout: u32,
    #[serde(flatten)]
    more: Option<More>,
}

/// What `--verbose` adds.
#[derive(Debug, Serialize)]
struct More {
    store_format: u32,
    rocksdb: &'static str,
    target: String,
    profile: &'static str,
    socket: String,
    /// The running broker; `null` if there is none that can be asked.
    broker: Option<Hello>,
    /// Why there is none.
    broker_error: Option<String>,
}

impl More {
    fn find(global: &Global) -> More {
        let (broker, broker_error) = match global.broker(PATIENCE) {
            Ok(broker) => (Some(broker.hello().clone()), None),
            Err(failure) => (None, Some(failure.text().to_owned())),
        };
        More {
            store_format: FORMAT,
            rocksdb: ROCKSDB_VERSION,
            target: target(),
            profile: match cfg!(debug_assertions) {
                true => "debug",
                false => "release",
            },
            socket: global.socket().display().to_string(),
            broker,
            broker_error,
        }
    }
}

fn target() -> String {
    let environment = match (cfg!(target_env = "gnu"), cfg!(target_env = "musl")) {
        (true, _) => "-gnu",
        (_, true) => "-musl",
        _ => "",
    };
    let (arch, os) = (std::env::consts::ARCH, std::env::consts::OS);
    format!("{arch}-{os}{environment}")
}

pub(super) fn run(global: &Global, args: &Args) -> Result<(), Failure> {
    let version = Version {
        version: env!("CARGO_PKG_VERSION"),
        protocol: PROTOCOL,
        layout: LAYOUT_VERSION,
        more: args.verbose.then(|| More::find(global)),
    };
    if args.json {
        return output::json(&version);
    }
    output::line(&show(&version))
}

fn show(version: &Version) -> String {
    let Some(more) = &version.more else {
        return format!(
            "ringmain {} (control protocol {}, memory layout {})",
            version.version, version.protocol, version.layout
        );
    };
    let broker = match &more.broker {
        Some(hello) => format!(
            "version {} (control protocol {}, memory layout {}), process {}, instance {}, at {}",
            hello.version, hello.protocol, hello.layout, hello.pid, hello.instance, more.socket
        ),
        None => more.broker_error.clone().unwrap_or_default(),
    };
    output::pairs(&[
        ("version", version.version.to_owned()),
        ("control protocol", version.protocol.to_string()),
        ("memory layout", version.layout.to_string()),
        ("store format", more.store_format.to_string()),
        ("rocksdb", more.rocksdb.to_owned()),
        ("target", more.target.clone()),
        ("profile", more.profile.to_owned()),
        ("broker", broker),
    ])
}
