//! Where a broker of this user is by default, for clients and the broker alike.

use crate::error::{Error, Result};
use nix::unistd::geteuid;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// The environment variable that names the socket.
pub const SOCKET_VARIABLE: &str = "RINGMAIN_SOCKET";

/// The socket that is used when nobody names one:
/// `$XDG_RUNTIME_DIR/ringmain/ringmain.sock` if that folder exists, else
/// `/tmp/ringmain-<uid>/ringmain.sock`.
pub fn default_socket() -> PathBuf {
    folder_in_variable("XDG_RUNTIME_DIR")
        .filter(|folder| folder.is_dir())
        .map_or_else(|| per_user("/tmp"), |folder| folder.join("ringmain"))
        .join("ringmain.sock")
}

/// The data folder that is used when nobody names one: `$XDG_DATA_HOME/ringmain`,
/// else `~/.local/share/ringmain`. [`Error::Invalid`] if this user has no home.
pub fn default_data_dir() -> Result<PathBuf> {
    let share = folder_in_variable("XDG_DATA_HOME")
        .or_else(|| std::env::home_dir().map(|home| home.join(".local/share")));
    match share {
        Some(folder) => Ok(folder.join("ringmain")),
        None => Err(Error::Invalid(
            "this user has no home folder: name the data folder with --data-dir".to_owned(),
        )),
    }
}

/// The folder for shared memory that is used when nobody names one:
/// `/dev/shm/ringmain-<uid>`.
pub fn default_shm_dir() -> PathBuf {
    per_user("/dev/shm")
}

/// Checks that nobody but this user, or root, can have put the socket there: its
/// folder must be theirs, and closed to others' writing. Without this, another
/// user could wait at a default path below `/tmp`, and be sent our messages. No
/// error if there is no such folder.
pub fn check_socket_folder(socket: &Path) -> Result<()> {
    let Some(folder) = socket.parent() else {
        return Ok(());
    };
    let Ok(metadata) = std::fs::symlink_metadata(folder) else {
        return Ok(());
    };
    let ours = [0, geteuid().as_raw()].contains(&metadata.uid());
    if metadata.is_dir() && ours && metadata.mode() & 0o022 == 0 {
        return Ok(());
    }
    Err(Error::NotPermitted(format!(
        "others can write to {}: name a socket in a folder of your own",
        folder.display()
    )))
}

fn folder_in_variable(name: &str) -> Option<PathBuf> {
    // The XDG rules: what is not an absolute path counts as not set.
    std::env::var_os(name)
        .map(PathBuf::from)
        .filter(|folder| folder.is_absolute())
}

fn per_user(folder: &str) -> PathBuf {
    Path::new(folder).join(format!("ringmain-{}", geteuid()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn default_paths_are_absolute_and_of_this_user() {
        assert!(default_socket().is_absolute());
        assert!(default_socket().ends_with("ringmain.sock"));
        let uid = geteuid().to_string();
        assert!(default_shm_dir().to_string_lossy().ends_with(&uid));
    }

    #[test]
    fn a_folder_open_to_others_is_refused() {
        let folder = tempfile::tempdir().expect("folder");
        let socket = folder.path().join("ringmain.sock");
        check_socket_folder(&socket).expect("private folder");
        let open = std::fs::Permissions::from_mode(0o777);
        std::fs::set_permissions(folder.path(), open).expect("chmod");
        let refused = check_socket_folder(&socket).expect_err("open folder");
        assert!(matches!(refused, Error::NotPermitted(_)));
        check_socket_folder(Path::new("/nonexistent/folder/socket")).expect("nothing there");
    }
}
