//! Servers that send what a test says.

use std::io::{Read, Result, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

static MIB: [u8; 1 << 20] = [b'x'; 1 << 20];

/// Sends so many bytes.
pub(super) fn fill(client: &mut TcpStream, mib: usize) -> Result<()> {
    (0..mib).try_for_each(|_| client.write_all(&MIB))
}

/// Sends the same bytes until the client ends the connection.
pub(super) fn for_ever(client: &mut TcpStream, bytes: &[u8]) -> Result<()> {
    let many = bytes.repeat((64 << 10) / bytes.len() + 1);
    loop {
        client.write_all(&many)?;
    }
}

/// Sends a byte now and then.
pub(super) fn drip(client: &mut TcpStream, byte: u8) -> Result<()> {
    client.set_nodelay(true)?;
    loop {
        client.write_all(&[byte])?;
        std::thread::sleep(Duration::from_millis(100));
    }
}

/// Sends nothing more until the client ends the connection.
pub(super) fn hold(client: &mut TcpStream) -> Result<()> {
    while client.read(&mut [0; 4096])? > 0 {}
    Ok(())
}

/// Serves one connection.
pub(super) type Serve = Arc<dyn Fn(TcpStream) -> Result<()> + Send + Sync>;

/// A server that serves each connection by the present function. Its threads end with the test's process.
pub(super) struct Server {
    pub(super) port: u16,
    serve: Arc<Mutex<Serve>>,
    connections: Arc<AtomicUsize>,
}

impl Server {
    /// Starts a server at a port, or at any if that is 0.
    pub(super) fn start(port: u16, serve: Serve) -> Self {
        let listener = TcpListener::bind(("127.0.0.1", port)).unwrap();
        let server = Self {
            port: listener.local_addr().unwrap().port(),
            serve: Arc::new(Mutex::new(serve)),
            connections: Arc::default(),
        };
        let (serve, count) = (Arc::clone(&server.serve), Arc::clone(&server.connections));
        std::thread::spawn(move || {
            for client in listener.incoming().map_while(Result::ok) {
                count.fetch_add(1, Ordering::Relaxed);
                let serve = Arc::clone(&serve.lock().unwrap());
                // The client ends the connections of most lies.
                std::thread::spawn(move || drop(serve(client)));
            }
        });
        server
    }

    pub(super) fn set(&self, serve: Serve) {
        *self.serve.lock().unwrap() = serve;
    }

    pub(super) fn connections(&self) -> usize {
        self.connections.load(Ordering::Relaxed)
    }
}
