//! A proxy that makes the network bad.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// The fault that the server's bytes meet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    /// Nothing.
    None,
    /// Each piece comes later.
    Delay(Duration),
    /// Nothing comes any more, and nothing ends.
    Stall,
    /// The connection is reset.
    Reset,
    /// The connection is closed after so many bytes of an answer.
    Cut(usize),
    /// Every request is answered with these bytes; then the connection is closed.
    Answer(&'static str),
}

/// A listening proxy. Its threads end with the test's process.
pub(crate) struct Proxy {
    port: u16,
    fault: Arc<Mutex<Fault>>,
}

impl Proxy {
    /// A proxy before a port of this machine, which nobody need listen at if every request is answered here. It listens
    /// at `port`, or at any if that is 0.
    pub(crate) fn start(port: u16, upstream: u16) -> Self {
        let listener = TcpListener::bind(("127.0.0.1", port)).unwrap();
        let port = listener.local_addr().unwrap().port();
        let fault = Arc::new(Mutex::new(Fault::None));
        let of_thread = Arc::clone(&fault);
        std::thread::spawn(move || {
            for client in listener.incoming().map_while(Result::ok) {
                let fault = Arc::clone(&of_thread);
                std::thread::spawn(move || serve(client, upstream, &fault));
            }
        });
        Self { port, fault }
    }

    pub(crate) fn port(&self) -> u16 {
        self.port
    }

    pub(crate) fn set(&self, fault: Fault) {
        *self.fault.lock().unwrap() = fault;
    }
}

fn serve(mut client: TcpStream, upstream: u16, fault: &Arc<Mutex<Fault>>) {
    let now = || *fault.lock().unwrap();
    if let Fault::Answer(answer) = now() {
        read_request(&mut client);
        let _ = client.write_all(answer.as_bytes());
        return;
    }
    if now() == Fault::Stall {
        stall();
    }
    let Ok(server) = TcpStream::connect(("127.0.0.1", upstream)) else {
        return reset(&client);
    };
    let (mut from, mut to) = (client.try_clone().unwrap(), server.try_clone().unwrap());
    std::thread::spawn(move || {
        let _ = std::io::copy(&mut from, &mut to);
        let _ = to.shutdown(Shutdown::Write);
    });
    let mut server = server;
    let mut piece = vec![0; 64 << 10];
    while let Ok(count @ 1..) = server.read(&mut piece) {
        let sent = match now() {
            Fault::None => client.write_all(&piece[..count]),
            Fault::Delay(time) => {
                std::thread::sleep(time);
                client.write_all(&piece[..count])
            }
            Fault::Stall => stall(),
            Fault::Reset => return reset(&client),
            Fault::Cut(after) => {
                let _ = client.write_all(&piece[..count.min(after)]);
                break;
            }
            Fault::Answer(_) => return reset(&client),
        };
        if sent.is_err() {
            break;
        }
    }
    let _ = client.shutdown(Shutdown::Both);
    let _ = server.shutdown(Shutdown::Both);
}

/// Reads an HTTP request with its body: what is left unread when a connection is closed resets it.
fn read_request(client: &mut TcpStream) {
    let mut bytes = Vec::new();
    let mut piece = vec![0; 64 << 10];
    while let Ok(count @ 1..) = client.read(&mut piece) {
        bytes.extend_from_slice(&piece[..count]);
        let text = String::from_utf8_lossy(&bytes).to_ascii_lowercase();
        let Some(head) = text.find("\r\n\r\n") else {
            continue;
        };
        let length = text[..head]
            .lines()
            .find_map(|line| line.strip_prefix("content-length:"));
        let length: usize = length.map_or(0, |length| length.trim().parse().unwrap());
        if bytes.len() >= head + 4 + length {
            return;
        }
    }
}

fn stall() -> ! {
    loop {
        std::thread::park();
    }
}

fn reset(client: &TcpStream) {
    let _ = rustix::net::sockopt::set_socket_linger(client, Some(Duration::ZERO));
    // The other thread's copy of the descriptor would keep the connection open.
    let _ = client.shutdown(Shutdown::Both);
}
