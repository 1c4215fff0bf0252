//! A Redis server for one test.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::{Child, Command, Stdio};

use super::child::free_port;

/// A running server. Dropping this ends the server.
pub(crate) struct Redis {
    child: Child,
    port: u16,
}

impl Redis {
    /// Starts a server with these additional arguments. The error says why it cannot be started.
    pub(crate) fn start(arguments: &[&str]) -> Result<Self, String> {
        // If another process takes the port meanwhile, the loop tries another port.
        let mut last = String::new();
        for _ in 0..5 {
            let named = arguments.iter().position(|of| *of == "--port");
            let named = named.map(|at| arguments[at + 1].parse().unwrap());
            let port = named.unwrap_or_else(free_port);
            let mut command = Command::new("redis-server");
            command
                .args([
                    "--save",
                    "",
                    "--appendonly",
                    "no",
                    "--bind",
                    "127.0.0.1",
                    "--port",
                ])
                .arg(port.to_string())
                .args(arguments)
                .stdout(Stdio::piped());
            let mut child = command.spawn().map_err(
                |_| "redis-server is not on PATH; on Debian and Ubuntu: apt install redis-server",
            )?;
            let mut lines = BufReader::new(child.stdout.take().expect("it is piped")).lines();
            let is_ready = |line: &String| line.contains("Ready to accept connections");
            let seen = lines
                .by_ref()
                .map_while(Result::ok)
                .inspect(|line| last.clone_from(line));
            if seen.into_iter().any(|line| is_ready(&line)) {
                // The server continues to write.
                std::thread::spawn(move || lines.for_each(drop));
                return Ok(Self { child, port });
            }
            let _ = child.wait();
        }
        panic!("redis-server does not start: {last}");
    }

    pub(crate) fn port(&self) -> u16 {
        self.port
    }

    pub(crate) fn url(&self) -> String {
        format!("redis://127.0.0.1:{}/0/test", self.port)
    }

    /// The answer to a command of one line.
    pub(crate) fn say(&self, command: &str) -> String {
        let mut connection = TcpStream::connect(("127.0.0.1", self.port)).unwrap();
        write!(connection, "{command}\r\nQUIT\r\n").unwrap();
        let mut answer = String::new();
        connection.read_to_string(&mut answer).unwrap();
        let answer = answer.strip_suffix("+OK\r\n").unwrap();
        assert!(!answer.starts_with('-'), "{command}: {answer}");
        answer.to_owned()
    }
}

impl Drop for Redis {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
