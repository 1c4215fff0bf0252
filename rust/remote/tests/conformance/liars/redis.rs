//! Redis servers that lie.

use std::io::{BufRead, BufReader, Read, Result, Write};
use std::net::TcpStream;
use std::sync::Arc;

use super::wire::{Serve, Server, drip, fill, for_ever, hold};
use super::*;
use crate::child::child;

const SLOW: &str = "single bytes";

type Lie = fn(&mut TcpStream) -> Result<()>;

const LIES: [(&str, Lie); 14] = [
    ("arrays inside each other", |client| {
        for_ever(client, b"*1\r\n")
    }),
    ("an array of 2^62", |client| {
        client.write_all(b"*4611686018427387904\r\n")?;
        for_ever(client, b":1\r\n")
    }),
    ("an array of empty arrays", |client| {
        client.write_all(b"*50000000\r\n")?;
        for_ever(client, b"*0\r\n")
    }),
    ("a map of 2^31", |client| {
        client.write_all(b"%2147483648\r\n")?;
        for_ever(client, b":1\r\n")
    }),
    ("bytes of 2^62", |client| {
        client.write_all(b"$4611686018427387904\r\n")?;
        for_ever(client, b"x")
    }),
    ("64 MiB", |client| {
        client.write_all(b"$67108864\r\n")?;
        fill(client, 64)?;
        hold(client)
    }),
    ("fewer than no bytes", |client| {
        client.write_all(b"$-5\r\n")?;
        hold(client)
    }),
    ("a line without an end", |client| for_ever(client, b"+x")),
    ("an error without an end", |client| for_ever(client, b"-x")),
    ("a push", |client| {
        for_ever(client, b">3\r\n+invalidate\r\n*1\r\n+x\r\n:1\r\n")
    }),
    ("a text for each answer", |client| {
        for_ever(client, b"+OK\r\n")
    }),
    ("another server for each key", |client| {
        for_ever(client, b"-MOVED 1 127.0.0.1:1\r\n")
    }),
    ("no Redis", |client| {
        client.write_all(b"HTTP/1.1 400 x\r\n\r\n")
    }),
    (SLOW, |client| drip(client, b'$')),
];

/// The name of the next command.
fn command(reader: &mut BufReader<TcpStream>) -> Result<String> {
    let line = |reader: &mut BufReader<TcpStream>| {
        let mut line = String::new();
        reader.read_line(&mut line)?;
        let number = line
            .get(1..)
            .and_then(|text| text.trim().parse::<u64>().ok());
        number.ok_or_else(|| std::io::Error::other("the end"))
    };
    let mut name = Vec::new();
    for index in 0..line(reader)? {
        let len = line(reader)?;
        let mut argument = reader.take(len + 2);
        match index {
            0 => drop(argument.read_to_end(&mut name)?),
            _ => drop(std::io::copy(&mut argument, &mut std::io::sink())?),
        }
    }
    Ok(String::from_utf8_lossy(&name).trim().to_owned())
}

/// Lies to every command but those of a new connection. `lies_of_map`: also about the cluster.
fn serves(lie: Lie, lies_of_map: bool) -> Serve {
    Arc::new(move |mut client| {
        let mut reader = BufReader::new(client.try_clone()?);
        loop {
            match command(&mut reader)?.as_str() {
                "PING" => client.write_all(b"+PONG\r\n")?,
                "CLUSTER" if !lies_of_map => client.write_all(b"-ERR no cluster\r\n")?,
                _ => lie(&mut client)?,
            }
        }
    })
}

#[test]
fn no_answer_of_redis_ends_the_process_fills_its_memory_or_takes_long() {
    child("liars::redis::before_a_liar", "", &[]);
}

/// The test above runs this one.
#[test]
#[ignore = "a part of another test"]
fn before_a_liar() {
    for lies_of_map in [false, true] {
        let empty: Lie = |client| client.write_all(b"$-1\r\n");
        let server = Server::start(0, serves(empty, false));
        let url = format!("redis://127.0.0.1:{}", server.port);
        let mut rig = Rig::new(&url, Box::new(())).unwrap();
        warm(&mut rig);
        for (name, lie) in LIES {
            server.set(serves(lie, lies_of_map));
            withstands(&mut rig, name, |rig| {
                read(rig, name);
                // A list may take longer than the other calls.
                if name != SLOW {
                    operate(rig);
                }
            });
        }
    }
}
