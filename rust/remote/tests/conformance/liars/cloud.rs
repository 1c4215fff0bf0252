//! Object stores that lie.

use std::io::{BufRead, BufReader, Read, Result, Write};
use std::net::TcpStream;
use std::sync::Arc;

use super::wire::{Serve, Server, drip, fill, for_ever, hold};
use super::*;
use crate::child::{child, free_port, url_of_parent};
use crate::fakes::{AZURE, GOOGLE};

struct Request {
    /// The first and last byte of a wanted object; `None` for other requests.
    range: Option<(u64, u64)>,
    is_list: bool,
    is_azure: bool,
}

impl Request {
    /// Reads a request, and its body.
    fn read(client: &TcpStream) -> Result<Self> {
        let mut reader = BufReader::new(client);
        let (mut head, mut line) = (String::new(), String::new());
        while reader.read_line(&mut line)? > 2 {
            head += &line.to_ascii_lowercase();
            line.clear();
        }
        let of = |name: &str| {
            let rest = head.split_once(name)?.1;
            Some(rest.split("\r\n").next()?.trim().to_owned())
        };
        let length = of("content-length:").map_or(0, |text| text.parse().unwrap());
        std::io::copy(&mut reader.take(length), &mut std::io::sink())?;
        let range = of("range: bytes=").map(|text| {
            let (first, last) = text.split_once('-').unwrap();
            (first.parse().unwrap(), last.parse().unwrap())
        });
        Ok(Self {
            is_list: head.starts_with("get ") && range.is_none(),
            is_azure: head.contains("x-ms-version"),
            range,
        })
    }

    /// A good answer's head, before its length.
    fn good(&self) -> String {
        let date = "last-modified: Mon, 23 Nov 2026 05:00:00 GMT\r\netag: \"a\"\r\n";
        match self.range {
            Some((first, last)) => {
                let all = last + 1;
                format!("HTTP/1.1 206 x\r\n{date}content-range: bytes {first}-{last}/{all}\r\n")
            }
            None => format!("HTTP/1.1 200 x\r\n{date}"),
        }
    }
}

/// Sends a list of so many objects, each in as few bytes as it may have.
fn list(client: &mut TcpStream, request: &Request, objects: usize) -> Result<()> {
    let time = "2026-11-23T05:00:00Z";
    let (head, one, tail) = match (request.is_list, request.is_azure) {
        (false, _) => ("", "x".to_owned(), ""),
        (true, false) => (
            "<ListBucketResult>",
            format!("<Contents><Key>a</Key><LastModified>{time}</LastModified><Size>1</Size></Contents>"),
            "</ListBucketResult>",
        ),
        (true, true) => (
            "<EnumerationResults><Blobs>",
            "<Blob><Name>a</Name><Properties><Last-Modified>Mon, 23 Nov 2026 05:00:00 GMT</Last-Modified>\
             <Content-Length>1</Content-Length><Content-Type>x</Content-Type></Properties></Blob>"
                .to_owned(),
            "</Blobs><NextMarker /></EnumerationResults>",
        ),
    };
    write!(client, "{}connection: close\r\n\r\n{head}", request.good())?;
    for _ in 0..objects / 1000 {
        client.write_all(one.repeat(1000).as_bytes())?;
    }
    client.write_all(tail.as_bytes())
}

type Lie = fn(&mut TcpStream, &Request) -> Result<()>;

const LIES: [(&str, Lie); 14] = [
    ("2^50 bytes", |client, request| {
        write!(
            client,
            "{}content-length: {}\r\n\r\n",
            request.good(),
            1u64 << 50
        )?;
        fill(client, 16)?;
        hold(client)
    }),
    ("64 MiB", |client, request| {
        write!(
            client,
            "{}content-length: {}\r\n\r\n",
            request.good(),
            64 << 20
        )?;
        fill(client, 64)
    }),
    ("bytes without an end", |client, request| {
        write!(client, "{}connection: close\r\n\r\n", request.good())?;
        for_ever(client, b"x")
    }),
    ("chunks without an end", |client, request| {
        write!(
            client,
            "{}transfer-encoding: chunked\r\n\r\n",
            request.good()
        )?;
        for_ever(client, b"8\r\nxxxxxxxx\r\n")
    }),
    ("headers without an end", |client, request| {
        write!(client, "{}", request.good())?;
        for_ever(client, b"x: xxxxxxxxxxxxxxxx\r\n")
    }),
    ("a header without an end", |client, request| {
        write!(client, "{}x: ", request.good())?;
        for_ever(client, b"x")
    }),
    ("an error of 64 MiB", |client, _| {
        write!(
            client,
            "HTTP/1.1 404 x\r\ncontent-length: {}\r\n\r\n",
            64 << 20
        )?;
        fill(client, 64)
    }),
    ("an error of 2^50 bytes", |client, _| {
        write!(
            client,
            "HTTP/1.1 403 x\r\ncontent-length: {}\r\n\r\n",
            1u64 << 50
        )?;
        fill(client, 16)?;
        hold(client)
    }),
    ("an error without an end", |client, _| {
        write!(
            client,
            "HTTP/1.1 500 x\r\ntransfer-encoding: chunked\r\n\r\n"
        )?;
        for_ever(client, b"8\r\nxxxxxxxx\r\n")
    }),
    ("elements inside each other", |client, request| {
        write!(
            client,
            "{}connection: close\r\n\r\n<ListBucketResult>",
            request.good()
        )?;
        (0..32).try_for_each(|_| client.write_all(&b"<Contents>".repeat(20_000)))
    }),
    ("objects in JSON inside each other", |client, request| {
        write!(client, "{}connection: close\r\n\r\n", request.good())?;
        (0..7).try_for_each(|_| client.write_all(&b"{\"a\":[".repeat(100_000)))
    }),
    (
        "as many objects as an answer may have",
        |client, request| {
            list(
                client,
                request,
                if request.is_azure { 20_000 } else { 6_000 },
            )
        },
    ),
    ("more objects than an answer may have", |client, request| {
        list(client, request, 80_000)
    }),
    ("a picture", |client, request| {
        write!(
            client,
            "{}content-type: image/png\r\nconnection: close\r\n\r\n",
            request.good()
        )?;
        client.write_all(b"\x89PNG\r\n\x1a\n\0\0\0\x0dIHDR")
    }),
];

/// The lies that take time. A list may take longer than the other calls.
const SLOW: [(&str, Lie); 4] = [
    ("continue without an end", |client, _| {
        for_ever(client, b"HTTP/1.1 100 x\r\n\r\n")
    }),
    ("a head in single bytes", |client, _| drip(client, b'H')),
    ("an object in single bytes", |client, request| {
        let len = request.range.map_or(1000, |(first, last)| last + 1 - first);
        write!(client, "{}content-length: {len}\r\n\r\n", request.good())?;
        drip(client, b'x')
    }),
    ("an error in single bytes", |client, _| {
        write!(client, "HTTP/1.1 404 x\r\ncontent-length: 100000\r\n\r\n")?;
        drip(client, b'x')
    }),
];

fn lies_to(url: &str, endpoint: &str, variables: &[(&str, &str)]) {
    let port = free_port();
    let server = format!("http://127.0.0.1:{port}");
    let variables = [&[(endpoint, server.as_str())], variables].concat();
    let of_child = format!("{port} {url}");
    child("liars::cloud::before_a_liar", &of_child, &variables);
}

#[test]
fn no_answer_of_s3_ends_the_process_fills_its_memory_or_leads_elsewhere() {
    let variables = [
        ("AWS_ALLOW_HTTP", "true"),
        ("AWS_ACCESS_KEY_ID", "key"),
        ("AWS_SECRET_ACCESS_KEY", "secret"),
        ("AWS_SESSION_TOKEN", "token"),
    ];
    lies_to("s3://bucket/prefix", "AWS_ENDPOINT_URL", &variables);
}

#[test]
fn no_answer_of_google_cloud_ends_the_process_fills_its_memory_or_leads_elsewhere() {
    lies_to("gs://bucket/prefix", "GOOGLE_BASE_URL", &GOOGLE);
}

#[test]
fn no_answer_of_azure_ends_the_process_fills_its_memory_or_leads_elsewhere() {
    lies_to("az://container/prefix", "AZURE_STORAGE_ENDPOINT", &AZURE);
}

/// Answers a request of each connection.
fn serves(lie: impl Fn(&mut TcpStream, &Request) -> Result<()> + Send + Sync + 'static) -> Serve {
    Arc::new(move |mut client| {
        let request = Request::read(&client)?;
        lie(&mut client, &request)?;
        client.shutdown(std::net::Shutdown::Write)
    })
}

/// Sends the client to another port.
fn redirects(port: u16) -> Serve {
    serves(move |client, _| {
        let to = format!("location: http://127.0.0.1:{port}/bucket/stolen");
        // The connection ends: a client that used it again would sometimes find it closed.
        let head = "HTTP/1.1 307 x\r\ncontent-length: 0\r\nconnection: close";
        write!(client, "{head}\r\n{to}\r\n\r\n")
    })
}

/// The tests above run this one.
#[test]
#[ignore = "a part of another test"]
fn before_a_liar() {
    let of_parent = url_of_parent();
    let (port, url) = of_parent.split_once(' ').unwrap();
    let other = Server::start(0, serves(LIES[0].1));
    let port = port.parse().unwrap();
    let empty = |client: &mut TcpStream, _: &Request| {
        client.write_all(b"HTTP/1.1 404 x\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
    };
    let server = Server::start(port, serves(empty));
    let mut rig = Rig::new(url, Box::new(())).unwrap();
    warm(&mut rig);
    let plain = LIES.map(|(name, lie)| (name, serves(lie))).into_iter();
    let leading = [
        ("a redirect to itself", port),
        ("a redirect elsewhere", other.port),
    ];
    let leading = leading.map(|(name, port)| (name, redirects(port)));
    for (name, serve) in plain.chain(leading) {
        server.set(serve);
        withstands(&mut rig, name, |rig| {
            read(rig, name);
            operate(rig);
        });
    }
    let said = rig.objects.greet().unwrap_err().to_string();
    assert!(said.contains("redirects to 127.0.0.1"), "{said}");
    assert_eq!(other.connections(), 0, "a redirect was followed");
    for (name, lie) in SLOW {
        server.set(serves(lie));
        withstands(&mut rig, name, |rig| read(rig, name));
    }
}
