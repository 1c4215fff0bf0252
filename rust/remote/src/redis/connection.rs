//! One connection to a server: RESP2 over TCP or TLS. The caller of each command gives the most bytes of its answer, so that
//! a server cannot fill this process's memory. The deadline of a call holds for all its bytes together.

use std::io::{self, BufRead, BufReader, ErrorKind, Read, Write};
use std::net::{TcpStream, ToSocketAddrs};
use std::sync::Arc;
use std::time::{Duration, Instant};

use redis::{Cmd, RedisError, RedisResult, Value};
use rustls::pki_types::ServerName;
use rustls::{ClientConfig, ClientConnection, RootCertStore, StreamOwned};
use undercroft_io::fork::Unshared;

use super::address::{Address, STALL};

/// Most bytes of an answer that is a number or a short text.
pub(super) const SHORT: u64 = 64 << 10;
/// Most bytes of a list of keys, or of a cluster's map.
pub(super) const LIST: u64 = 8 << 20;
/// Begins the text of the error that an answer is longer than that.
pub(super) const TOO_LONG: &str = "an answer of the server is too long";

/// A call ends within this time and the time of its bytes at this rate in bytes a second.
const LIMIT: Duration = Duration::from_secs(3);
const RATE: u64 = 4 << 20;
/// Most bytes of one line.
const LINE: u64 = 64 << 10;
/// Most arrays inside each other. The map of a cluster has three.
const DEPTH: u32 = 8;

/// How connections are made.
pub(super) struct Access {
    pub(super) username: Option<String>,
    pub(super) password: Option<String>,
    pub(super) database: i64,
    /// The trusted roots, with TLS.
    pub(super) tls: Option<Arc<ClientConfig>>,
}

/// The settings of TLS: the system's roots, or those that `SSL_CERT_FILE` and `SSL_CERT_DIR` name.
pub(super) fn tls() -> Result<Arc<ClientConfig>, rustls::Error> {
    let mut roots = RootCertStore::empty();
    // A file without a usable root leaves servers that no root vouches for.
    roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let config =
        ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions()?;
    Ok(Arc::new(
        config.with_root_certificates(roots).with_no_client_auth(),
    ))
}

/// A TCP connection whose calls fail after a deadline.
struct Timed {
    stream: Unshared<TcpStream>,
    deadline: Instant,
}

impl Timed {
    fn check(&self) -> io::Result<()> {
        match Instant::now() < self.deadline {
            true => Ok(()),
            false => Err(ErrorKind::TimedOut.into()),
        }
    }
}

impl Read for Timed {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        self.check()?;
        self.stream.read(bytes)
    }
}

impl Write for Timed {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.check()?;
        self.stream.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.stream.flush()
    }
}

enum Stream {
    Plain(Timed),
    Tls(Box<StreamOwned<ClientConnection, Timed>>),
}

impl Stream {
    fn timed(&mut self) -> &mut Timed {
        match self {
            Self::Plain(timed) => timed,
            Self::Tls(stream) => &mut stream.sock,
        }
    }

    fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        match self {
            Self::Plain(timed) => timed.write_all(bytes),
            Self::Tls(stream) => stream.write_all(bytes).and_then(|()| stream.flush()),
        }
    }
}

impl Read for Stream {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        match self {
            Self::Plain(timed) => timed.read(bytes),
            Self::Tls(stream) => stream.read(bytes),
        }
    }
}

/// A connection.
pub(super) struct RedisConnection(BufReader<Stream>);

impl RedisConnection {
    /// Connects, logs in and selects the database.
    pub(super) fn open(address: &Address, access: &Access) -> RedisResult<Self> {
        let timed = Timed {
            stream: connect(address)?.into(),
            deadline: Instant::now() + LIMIT,
        };
        let stream = match &access.tls {
            None => Stream::Plain(timed),
            Some(config) => {
                let name = ServerName::try_from(address.0.clone());
                let name = name.map_err(io::Error::other)?;
                let client = ClientConnection::new(Arc::clone(config), name);
                let client = client.map_err(io::Error::other)?;
                Stream::Tls(Box::new(StreamOwned::new(client, timed)))
            }
        };
        let mut connection = Self(BufReader::new(stream));
        if let Some(password) = &access.password {
            let login = redis::cmd("AUTH")
                .arg(&access.username)
                .arg(password)
                .take();
            connection.ask(&login).map_err(|error| {
                let what = (redis::ErrorKind::AuthenticationFailed, "the login failed");
                RedisError::from((what.0, what.1, error.to_string()))
            })?;
        }
        if access.database != 0 {
            connection.ask(&redis::cmd("SELECT").arg(access.database).take())?;
        }
        // A server that requires a password closes the connection at a large value without an error. PING returns it.
        connection.ask(&redis::cmd("PING"))?;
        Ok(connection)
    }

    fn ask(&mut self, command: &Cmd) -> RedisResult<()> {
        let mut answers = self.exchange(&command.get_packed_command(), 1, SHORT)?;
        let answer = answers.pop().unwrap_or(Value::Nil);
        answer.extract_error().map(drop)
    }

    /// Sends commands and reads `count` answers, of `most` bytes in all. After an error the connection cannot be used.
    pub(super) fn exchange(
        &mut self,
        packed: &[u8],
        count: usize,
        most: u64,
    ) -> RedisResult<Vec<Value>> {
        let time = LIMIT + Duration::from_secs((packed.len() as u64 + most) / RATE);
        self.0.get_mut().timed().deadline = Instant::now() + time;
        self.0.get_mut().write(packed)?;
        let mut answers = Answers {
            reader: &mut self.0,
            room: most,
        };
        (0..count).map(|_| answers.next(0)).collect()
    }

    /// Whether nothing arrived that was not asked for.
    pub(super) fn is_clean(&self) -> bool {
        self.0.buffer().is_empty()
    }
}

/// Connects to the first address of a host that answers.
fn connect((host, port): &Address) -> io::Result<TcpStream> {
    let mut last = io::Error::new(ErrorKind::NotFound, "the host has no address");
    for address in (host.as_str(), *port).to_socket_addrs()? {
        match TcpStream::connect_timeout(&address, STALL) {
            Ok(stream) => {
                stream.set_nodelay(true)?;
                stream.set_read_timeout(Some(STALL))?;
                stream.set_write_timeout(Some(STALL))?;
                return Ok(stream);
            }
            Err(error) => last = error,
        }
    }
    Err(last)
}

/// Reads answers.
struct Answers<'a, R> {
    reader: &'a mut R,
    /// Bytes of memory that the answers may still take.
    room: u64,
}

impl<R: BufRead> Answers<'_, R> {
    /// The next answer, inside `depth` arrays.
    fn next(&mut self, depth: u32) -> RedisResult<Value> {
        self.take(size_of::<Value>() as u64)?;
        let line = self.line()?;
        let (kind, number) = line.split_at(1);
        match kind {
            b"+" | b"-" | b":" => redis::parse_redis_value(&line),
            b"$" => match length(number)? {
                None => Ok(Value::Nil),
                Some(len) => Ok(Value::BulkString(self.bytes(len)?)),
            },
            b"*" if depth < DEPTH => match length(number)? {
                None => Ok(Value::Nil),
                Some(len) => {
                    let values = (0..len).map(|_| self.next(depth + 1));
                    values.collect::<RedisResult<_>>().map(Value::Array)
                }
            },
            _ => Err(not_understood().into()),
        }
    }

    fn take(&mut self, bytes: u64) -> io::Result<()> {
        let left = self.room.checked_sub(bytes);
        self.room = left.ok_or_else(|| io::Error::new(ErrorKind::FileTooLarge, TOO_LONG))?;
        Ok(())
    }

    /// The next line, with its end.
    fn line(&mut self) -> io::Result<Vec<u8>> {
        let mut line = Vec::new();
        self.reader.take(LINE).read_until(b'\n', &mut line)?;
        self.take(line.len() as u64)?;
        match line.ends_with(b"\r\n") {
            true => Ok(line),
            false if line.len() as u64 == LINE => {
                Err(io::Error::new(ErrorKind::FileTooLarge, TOO_LONG))
            }
            false if line.ends_with(b"\n") => Err(not_understood()),
            false => Err(ErrorKind::UnexpectedEof.into()),
        }
    }

    fn bytes(&mut self, len: u64) -> io::Result<Vec<u8>> {
        self.take(len)?;
        // The room limits the length.
        let mut bytes = Vec::with_capacity(len as usize);
        self.reader.take(len).read_to_end(&mut bytes)?;
        let mut end = [0; 2];
        self.reader.read_exact(&mut end)?;
        match end == *b"\r\n" {
            true => Ok(bytes),
            false => Err(not_understood()),
        }
    }
}

/// The length in a line; `None` for a value that is not there.
fn length(line: &[u8]) -> io::Result<Option<u64>> {
    let text = std::str::from_utf8(line).map_err(|_| not_understood())?;
    match text.trim_end().parse::<i64>() {
        Ok(-1) => Ok(None),
        Ok(number) => number.try_into().map(Some).map_err(|_| not_understood()),
        Err(_) => Err(not_understood()),
    }
}

fn not_understood() -> io::Error {
    let text = "the server's answer is not one of Redis";
    io::Error::new(ErrorKind::InvalidData, text)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(bytes: &[u8], room: u64) -> Result<Value, String> {
        let mut reader = bytes;
        let mut answers = Answers {
            reader: &mut reader,
            room,
        };
        answers.next(0).map_err(|error| error.to_string())
    }

    #[test]
    fn an_answer_is_a_text_a_number_an_error_bytes_or_an_array() {
        let bytes = |text: &str| Value::BulkString(text.as_bytes().to_vec());
        for (sent, value) in [
            ("+OK\r\n", Value::Okay),
            (":-7\r\n", Value::Int(-7)),
            ("$3\r\na\r\n\r\n", bytes("a\r\n")),
            ("$0\r\n\r\n", bytes("")),
            ("$-1\r\n", Value::Nil),
            ("*-1\r\n", Value::Nil),
            (
                "*2\r\n:1\r\n*1\r\n$1\r\nx\r\n",
                Value::Array(vec![Value::Int(1), Value::Array(vec![bytes("x")])]),
            ),
        ] {
            assert_eq!(read(sent.as_bytes(), 4096), Ok(value), "{sent:?}");
        }
        let Ok(Value::ServerError(error)) = read(b"-MOVED 1 host:7\r\n", 4096) else {
            panic!("an error");
        };
        assert_eq!((error.code(), error.details()), ("MOVED", Some("1 host:7")));
    }

    #[test]
    fn an_answer_that_is_longer_than_allowed_is_refused_before_memory_is_taken_for_it() {
        for sent in [
            "$4611686018427387904\r\n".to_owned(),
            "$5000\r\n".to_owned(),
            format!("*4611686018427387904\r\n{}", ":1\r\n".repeat(100)),
            format!("*100\r\n{}", "*0\r\n".repeat(100)),
            format!("+{}\r\n", "x".repeat(5000)),
            format!("+{}", "x".repeat(70_000)),
        ] {
            let error = read(sent.as_bytes(), 4096).unwrap_err();
            assert!(error.contains(TOO_LONG), "{error}: {}", &sent[..10]);
        }
        let line = format!("+{}", "x".repeat(70_000));
        let error = read(line.as_bytes(), LIST).unwrap_err();
        assert!(error.contains(TOO_LONG), "{error}");
    }

    #[test]
    fn an_answer_of_another_form_is_refused() {
        let nested = "*1\r\n".repeat(100_000);
        for sent in [
            "$-5\r\n",
            "$x\r\n",
            "%1\r\n",
            ">1\r\n",
            "\r\n",
            "+OK\n",
            "$1\r\nxyz",
            &nested,
        ] {
            let error = read(sent.as_bytes(), LIST).unwrap_err();
            assert!(
                error.contains("not one of Redis"),
                "{error}: {:?}",
                &sent[..4]
            );
        }
        for cut in ["", "+O", "$3\r\nab", "*2\r\n:1\r\n"] {
            assert!(read(cut.as_bytes(), LIST).is_err(), "{cut:?}");
        }
    }
}
