//! `ringmain serve`: the broker itself.

use super::exit::{FAILED, Failure, OTHER_VERSION};
use super::units::size;
use super::{Global, logging, output};
use ringmain::paths;
use ringmain_broker::service::{self, BrokerError, ServeOptions, Stop, StopHandle};
use ringmain_broker::store::StoreError;
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use std::io;
use std::path::{Path, PathBuf};

/// Start the broker
///
/// It runs in the foreground, prints the path of its socket once it is in
/// service, and logs to standard error. SIGTERM and Ctrl-C stop it, with exit
/// code 0: what it holds is stored and synced first.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Example:\n  ringmain serve --data-dir /var/lib/ringmain --socket /run/ringmain/socket"
)]
pub(super) struct Args {
    /// Where messages are stored [default: ringmain in the user's data folder]
    #[arg(long, env = "RINGMAIN_DATA_DIR", value_name = "PATH")]
    data_dir: Option<PathBuf>,
    /// Folder for shared memory, on a tmpfs [default: /dev/shm/ringmain-UID]
    #[arg(long, env = "RINGMAIN_SHM_DIR", value_name = "PATH")]
    shm_dir: Option<PathBuf>,
    /// Free disk space that is left untouched: below it sends wait, while acks
    /// go on
    #[arg(long, value_name = "SIZE", value_parser = size, default_value = "256MiB")]
    disk_reserve: u64,
    /// Shared memory for the large payloads of one client, each way
    #[arg(long, value_name = "SIZE", value_parser = size, default_value = "2GiB")]
    session_payload_memory: u64,
    /// Shared memory for all large payloads, half of it each way [default: half of
    /// the file system of --shm-dir]
    #[arg(long, value_name = "SIZE", value_parser = size)]
    payload_memory: Option<u64>,
    /// How log lines look
    #[arg(long, value_enum, default_value_t = logging::Format::Text)]
    log_format: logging::Format,
    /// What is logged: error, warn, info, debug or trace, also by module
    #[arg(
        long,
        env = "RINGMAIN_LOG",
        value_name = "LEVEL",
        default_value = "info"
    )]
    log_level: String,
}

impl Args {
    /// With these folders, for a broker that lives shortly.
    pub(super) fn for_folders(data_dir: &Path, shm_dir: &Path) -> Args {
        Args {
            data_dir: Some(data_dir.to_owned()),
            shm_dir: Some(shm_dir.to_owned()),
            disk_reserve: 64 << 20,
            session_payload_memory: 2 << 30,
            payload_memory: None,
            log_format: logging::Format::Text,
            log_level: "info".to_owned(),
        }
    }
}

pub(super) fn run(global: &Global, args: &Args) -> Result<(), Failure> {
    logging::start(args.log_format, &args.log_level)?;
    raise_descriptor_limit();
    let options = options(global, args)?;
    let (stop, handle) = Stop::new().map_err(|e| Failure::io("cannot make the stop handle", &e))?;
    stop_on_signals(handle).map_err(|e| Failure::io("cannot catch signals", &e))?;
    let socket = options.socket.display().to_string();
    let in_service = || {
        // The broker serves, whether its starter reads this or not.
        let _ = output::line(&socket);
    };
    service::serve(&options, &stop, in_service).map_err(|e| failure(&e, &options.data_dir))
}

/// What kept the broker from going on. These two don't name the folder.
fn failure(error: &BrokerError, data_dir: &Path) -> Failure {
    let text = match error {
        BrokerError::Store(StoreError::Corrupt(_) | StoreError::Version { .. }) => {
            format!("{}: {error}", data_dir.display())
        }
        error => error.to_string(),
    };
    let code = match error.is_of_another_version() {
        true => OTHER_VERSION,
        false => FAILED,
    };
    Failure::new(code, text)
}

fn options(global: &Global, args: &Args) -> Result<ServeOptions, Failure> {
    let data_dir = match &args.data_dir {
        Some(folder) => folder.clone(),
        None => paths::default_data_dir()?,
    };
    if global.socket.is_none() {
        // Clients check the same, and would refuse this broker.
        paths::check_socket_folder(&paths::default_socket())?;
    }
    let shm_dir = args.shm_dir.clone().unwrap_or_else(paths::default_shm_dir);
    Ok(ServeOptions {
        data_dir,
        shm_dir,
        socket: global.socket(),
        disk_reserve_bytes: args.disk_reserve,
        session_payload_bytes: args.session_payload_memory,
        payload_bytes: args.payload_memory,
    })
}

/// Each session takes a few descriptors, and the usual limit of 1024 is one for
/// programs that call `select`.
fn raise_descriptor_limit() {
    let mut limit = libc::rlimit {
        rlim_cur: 0,
        rlim_max: 0,
    };
    // SAFETY: the call writes to the struct, which lives.
    let got = unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit) };
    limit.rlim_cur = limit.rlim_max;
    // SAFETY: the call reads the struct, which lives.
    if got != 0 || unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit) } != 0 {
        tracing::warn!("cannot raise the limit of open files");
    }
}

/// The first signal stops the broker in good order, the second one at once:
/// that loses nothing either.
fn stop_on_signals(handle: StopHandle) -> io::Result<()> {
    let mut signals = Signals::new([SIGINT, SIGTERM])?;
    std::thread::Builder::new()
        .name("signals".to_owned())
        .spawn(move || {
            let mut stopping = false;
            for signal in signals.forever() {
                if stopping {
                    let _ = signal_hook::low_level::emulate_default_handler(signal);
                }
                tracing::info!(signal, "stopping");
                handle.stop();
                stopping = true;
            }
        })?;
    Ok(())
}
