//! A proxy with network faults.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// The fault of the network.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    /// No fault.
    None,
    /// Each piece arrives later.
    Delay(Duration),
    /// This many bytes a second pass on each connection, in each direction.
    Slow(u64),
    /// No further byte arrives, and no connection ends.
    Stall,
    /// The connection is reset.
    Reset,
    /// The connection is closed after this many bytes of an answer.
    Cut(usize),
    /// A bit of each large piece is flipped.
    Flip,
    /// Every request is answered with these bytes; then the connection is closed.
    Answer(&'static str),
}

/// The present fault. If there is a next fault: the bytes of answers until then, and that fault.
type State = Mutex<(Fault, Option<(u64, Fault)>)>;

/// A listening proxy. Its threads end with the test's process.
pub(crate) struct Proxy {
    port: u16,
    state: Arc<State>,
    /// Connections of an earlier generation pass no answers.
    generation: Arc<AtomicU64>,
}

/// A shorter piece has more bytes of the protocol than of an object.
const LARGE: usize = 16 << 10;
/// Most bytes that pass at a time.
const PIECE: usize = 64 << 10;

impl Proxy {
    /// A proxy before the port `upstream` of this machine. No server is needed there if the proxy answers all requests.
    /// The proxy listens at `port`, or at any port if that is 0.
    pub(crate) fn start(port: u16, upstream: u16) -> Self {
        let listener = TcpListener::bind(("127.0.0.1", port)).unwrap();
        let port = listener.local_addr().unwrap().port();
        let state = Arc::new(Mutex::new((Fault::None, None)));
        let generation = Arc::new(AtomicU64::new(0));
        let of_thread = (Arc::clone(&state), Arc::clone(&generation));
        std::thread::spawn(move || {
            for client in listener.incoming().map_while(Result::ok) {
                let (state, generation) = of_thread.clone();
                std::thread::spawn(move || serve(client, upstream, &state, &generation));
            }
        });
        Self {
            port,
            state,
            generation,
        }
    }

    pub(crate) fn port(&self) -> u16 {
        self.port
    }

    /// The connections so far pass no answers any more, and do not end: like those that a router has forgotten.
    pub(crate) fn forget_connections(&self) {
        self.generation.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn set(&self, fault: Fault) {
        *self.state.lock().unwrap() = (fault, None);
    }

    /// The fault begins after this many bytes of answers.
    pub(crate) fn set_after(&self, bytes: u64, fault: Fault) {
        *self.state.lock().unwrap() = (Fault::None, Some((bytes, fault)));
    }
}

/// The fault for the next `bytes` of an answer.
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

fn serve(mut client: TcpStream, upstream: u16, state: &Arc<State>, generation: &AtomicU64) {
    let born = generation.load(Ordering::Relaxed);
    let is_forgotten = || generation.load(Ordering::Relaxed) != born;
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
    pass_answers(&mut client, &server, state, is_forgotten);
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

/// Delayed pieces wait in a queue, so that the delays of several pieces overlap.
fn pass_answers(
    client: &mut TcpStream,
    mut server: &TcpStream,
    state: &State,
    is_forgotten: impl Fn() -> bool,
) {
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
        if is_forgotten() {
            stall();
        }
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

/// Reads an HTTP request with its body: closing a connection with unread bytes resets the connection.
fn read_request(client: &mut TcpStream) {
    let mut bytes = Vec::new();
    let mut piece = vec![0; PIECE];
    while let Ok(count @ 1..) = client.read(&mut piece) {
        bytes.extend_from_slice(&piece[..count]);
        let text = String::from_utf8_lossy(&bytes).to_ascii_lowercase();
        let Some(head) = text.find("\r\n\r\n") else {
            // A command of Redis has no such end, and is answered at once.
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

pub(crate) fn stall() -> ! {
    loop {
        std::thread::park();
    }
}

fn reset(client: &TcpStream) {
    let _ = rustix::net::sockopt::set_socket_linger(client, Some(Duration::ZERO));
    // The other thread's copy of the descriptor would keep the connection open.
    let _ = client.shutdown(Shutdown::Both);
}
