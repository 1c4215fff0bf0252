//! A proxy that makes the network bad.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// The fault that the server's bytes meet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    /// Nothing.
    None,
    /// Each piece comes later.
    Delay(Duration),
    /// So many bytes a second pass on each connection, both ways.
    Slow(u64),
    /// Nothing comes any more, and nothing ends.
    Stall,
    /// The connection is reset.
    Reset,
    /// The connection is closed after so many bytes of an answer.
    Cut(usize),
    /// A bit of each large piece is another one.
    Flip,
    /// Every request is answered with these bytes; then the connection is closed.
    Answer(&'static str),
}

/// The fault that is now, and the next one after so many bytes of answers.
type State = Mutex<(Fault, Option<(u64, Fault)>)>;

/// A listening proxy. Its threads end with the test's process.
pub(crate) struct Proxy {
    port: u16,
    state: Arc<State>,
}

/// A piece shorter than this has more of the protocol than of an object.
const LARGE: usize = 16 << 10;
/// Bytes that pass at a time.
const PIECE: usize = 64 << 10;

impl Proxy {
    /// A proxy before a port of this machine, which nobody need listen at if every request is answered here. It listens
    /// at `port`, or at any if that is 0.
    pub(crate) fn start(port: u16, upstream: u16) -> Self {
        let listener = TcpListener::bind(("127.0.0.1", port)).unwrap();
        let port = listener.local_addr().unwrap().port();
        let state = Arc::new(Mutex::new((Fault::None, None)));
        let of_thread = Arc::clone(&state);
        std::thread::spawn(move || {
            for client in listener.incoming().map_while(Result::ok) {
                let state = Arc::clone(&of_thread);
                std::thread::spawn(move || serve(client, upstream, &state));
            }
        });
        Self { port, state }
    }

    pub(crate) fn port(&self) -> u16 {
        self.port
    }

    pub(crate) fn set(&self, fault: Fault) {
        *self.state.lock().unwrap() = (fault, None);
    }

    /// The fault begins after so many bytes of answers.
    pub(crate) fn set_after(&self, bytes: u64, fault: Fault) {
        *self.state.lock().unwrap() = (Fault::None, Some((bytes, fault)));
    }
}

/// The fault that the next `bytes` of an answer meet.
fn of_answer(state: &State, bytes: usize) -> Fault {
    let mut state = state.lock().unwrap();
    if let Some((left, next)) = state.1 {
        *state = match left.checked_sub(bytes as u64) {
            Some(left) => (state.0, Some((left, next))),
            None => (next, None),
        };
    }
    state.0
}

fn serve(mut client: TcpStream, upstream: u16, state: &Arc<State>) {
    match of_answer(state, 0) {
        Fault::Answer(answer) => {
            read_request(&mut client);
            let _ = client.write_all(answer.as_bytes());
            return;
        }
        Fault::Stall => stall(),
        _ => {}
    }
    let Ok(server) = TcpStream::connect(("127.0.0.1", upstream)) else {
        return reset(&client);
    };
    let (from, to) = (client.try_clone().unwrap(), server.try_clone().unwrap());
    let of_thread = Arc::clone(state);
    std::thread::spawn(move || pass_requests(from, to, &of_thread));
    pass_answers(&mut client, &server, state);
    let _ = client.shutdown(Shutdown::Both);
    let _ = server.shutdown(Shutdown::Both);
}

fn pass_requests(mut from: TcpStream, mut to: TcpStream, state: &State) {
    let mut piece = vec![0; PIECE];
    while let Ok(count @ 1..) = from.read(&mut piece) {
        if let Fault::Slow(rate) = of_answer(state, 0) {
            std::thread::sleep(Duration::from_secs(count as u64) / rate as u32);
        }
        if to.write_all(&piece[..count]).is_err() {
            break;
        }
    }
    let _ = to.shutdown(Shutdown::Write);
}

/// Pieces that are delayed wait in a queue: the next ones are delayed beside them.
fn pass_answers(client: &mut TcpStream, mut server: &TcpStream, state: &State) {
    let (late, pieces) = channel::<(Instant, Vec<u8>)>();
    let mut to = client.try_clone().unwrap();
    let writer = std::thread::spawn(move || {
        for (due, piece) in pieces {
            std::thread::sleep(due.saturating_duration_since(Instant::now()));
            if to.write_all(&piece).is_err() {
                break;
            }
        }
    });
    let mut piece = vec![0; PIECE];
    while let Ok(count @ 1..) = server.read(&mut piece) {
        let mut piece = piece[..count].to_vec();
        let mut due = Instant::now();
        match of_answer(state, count) {
            Fault::None => {}
            Fault::Delay(time) => due += time,
            Fault::Slow(rate) => {
                std::thread::sleep(Duration::from_secs(count as u64) / rate as u32);
            }
            Fault::Stall => stall(),
            Fault::Reset | Fault::Answer(_) => return reset(client),
            Fault::Cut(after) => {
                piece.truncate(after);
                let _ = late.send((due, piece));
                break;
            }
            Fault::Flip if count >= LARGE => piece[LARGE / 2] ^= 1,
            Fault::Flip => {}
        }
        if late.send((due, piece)).is_err() {
            break;
        }
    }
    drop(late);
    let _ = writer.join();
}

/// Reads an HTTP request with its body: what is left unread when a connection is closed resets it.
fn read_request(client: &mut TcpStream) {
    let mut bytes = Vec::new();
    let mut piece = vec![0; PIECE];
    while let Ok(count @ 1..) = client.read(&mut piece) {
        bytes.extend_from_slice(&piece[..count]);
        let text = String::from_utf8_lossy(&bytes).to_ascii_lowercase();
        let Some(head) = text.find("\r\n\r\n") else {
            // A command of Redis has no such end: it is answered at once.
            if bytes.starts_with(b"*") {
                return;
            }
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
