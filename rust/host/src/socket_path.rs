//! Where sockets are by default. The only place that reads the environment.

use std::path::PathBuf;

/// Directory of the sockets: `$XDG_RUNTIME_DIR/undercroft`, else `undercroft-<uid>` in the directory for temporary files.
pub fn default_socket_dir() -> PathBuf {
    match std::env::var_os("XDG_RUNTIME_DIR").filter(|dir| !dir.is_empty()) {
        Some(dir) => PathBuf::from(dir).join("undercroft"),
        None => {
            let uid = rustix::process::getuid().as_raw();
            std::env::temp_dir().join(format!("undercroft-{uid}"))
        }
    }
}

/// The socket at which `undercroft serve` listens, and `undercroft status` asks, unless told otherwise.
pub fn default_server_socket() -> PathBuf {
    default_socket_dir().join("serve.sock")
}
