//! Google Cloud Storage and Azure Blob Storage. No package has a server that speaks both protocols, so servers of these
//! tests answer as the services' documents say. These tests show that undercroft's settings of the clients fit its
//! requests. They do not show that the services answer in this way.

use std::collections::{BTreeMap, HashMap};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use undercroft_remote::ObjectBody;

use crate::child::{child, free_port, url_of_parent};
use crate::proxy::stall;
use crate::rig::Rig;

/// Objects in one answer to a list. A list then has several answers.
const PAGE: usize = 3;
/// Credentials of any kind.
pub(crate) const GOOGLE: [(&str, &str); 2] = [
    ("GOOGLE_ALLOW_HTTP", "true"),
    ("GOOGLE_BEARER_TOKEN", "token"),
];
pub(crate) const AZURE: [(&str, &str); 3] = [
    ("AZURE_ALLOW_HTTP", "true"),
    ("AZURE_STORAGE_ACCOUNT_NAME", "account"),
    ("AZURE_STORAGE_ACCOUNT_KEY", "c2VjcmV0"),
];
/// The URL of a server of Google Cloud.
pub(crate) const URL: &str = "gs://bucket/prefix";
/// The status of a request that is never answered.
pub(crate) const HANGS: u16 = 0;

/// Bytes and time of modification of each object.
type Objects = BTreeMap<String, (Vec<u8>, SystemTime)>;

/// What the server has, and how it fails.
#[derive(Default)]
pub(crate) struct Server {
    objects: Mutex<Objects>,
    /// The next requests of this method get this status: method, status, number of requests.
    failing: Mutex<Option<(&'static str, u16, usize)>>,
    /// The method of each request.
    methods: Mutex<Vec<String>>,
}

impl Server {
    /// The next `count` requests of a method get this status.
    pub(crate) fn fail(&self, method: &'static str, status: u16, count: usize) {
        *self.failing.lock().unwrap() = Some((method, status, count));
    }

    /// Number of requests of a method.
    pub(crate) fn count(&self, method: &str) -> usize {
        let methods = self.methods.lock().unwrap();
        methods.iter().filter(|of| *of == method).count()
    }

    /// Makes all objects older.
    pub(crate) fn age(&self, by: Duration) {
        for (_, modified) in self.objects.lock().unwrap().values_mut() {
            *modified -= by;
        }
    }

    /// Bytes and time of modification of the object whose name ends so.
    pub(crate) fn object(&self, name: &str) -> (Vec<u8>, SystemTime) {
        let objects = self.objects.lock().unwrap();
        let found = objects.iter().find(|(of, _)| of.ends_with(name));
        found.unwrap().1.clone()
    }

    /// The status of a request that fails.
    fn failure(&self, method: &str) -> Option<u16> {
        self.methods.lock().unwrap().push(method.to_owned());
        let mut failing = self.failing.lock().unwrap();
        let (of, status, left) = failing.as_mut()?;
        if *of != method || *left == 0 {
            return None;
        }
        *left -= 1;
        Some(*status)
    }
}

struct Request {
    method: String,
    /// The name after the bucket or container; empty for the bucket or container itself.
    name: String,
    query: HashMap<String, String>,
    headers: HashMap<String, String>,
    body: Vec<u8>,
}

struct Answer {
    status: u16,
    headers: Vec<(&'static str, String)>,
    body: Vec<u8>,
}

fn answer(status: u16, body: impl Into<Vec<u8>>) -> Answer {
    let (headers, body) = (Vec::new(), body.into());
    Answer {
        status,
        headers,
        body,
    }
}

/// Starts a server at a port, or at any if that is 0. Its threads end with the test's process.
fn start(port: u16) -> (u16, Arc<Server>) {
    let listener = TcpListener::bind(("127.0.0.1", port)).unwrap();
    let port = listener.local_addr().unwrap().port();
    let server: Arc<Server> = Arc::default();
    let of_thread = Arc::clone(&server);
    std::thread::spawn(move || {
        for client in listener.incoming().map_while(Result::ok) {
            let server = Arc::clone(&of_thread);
            std::thread::spawn(move || serve(client, &server));
        }
    });
    (port, server)
}

fn serve(mut client: TcpStream, server: &Server) {
    let mut reader = BufReader::new(client.try_clone().unwrap());
    while let Some(request) = read(&mut reader) {
        let failed = match server.failure(&request.method) {
            Some(HANGS) => stall(),
            status => status.map(|status| answer(status, "")),
        };
        let Answer {
            status,
            headers,
            body,
        } = failed.unwrap_or_else(|| respond(&request, &server.objects));
        let mut head = format!("HTTP/1.1 {status} x\r\ncontent-length: {}\r\n", body.len());
        for (name, value) in headers {
            head += &format!("{name}: {value}\r\n");
        }
        let mut bytes = (head + "\r\n").into_bytes();
        if request.method != "HEAD" {
            bytes.extend(body);
        }
        if client.write_all(&bytes).is_err() {
            return;
        }
    }
}

fn read(reader: &mut BufReader<TcpStream>) -> Option<Request> {
    let mut lines = Vec::new();
    loop {
        let mut line = String::new();
        reader
            .read_line(&mut line)
            .ok()
            .filter(|count| *count > 0)?;
        match line.trim_end() {
            "" => break,
            line => lines.push(line.to_owned()),
        }
    }
    let mut words = lines.first()?.split(' ');
    let (method, target) = (words.next()?.to_owned(), words.next()?);
    let headers = lines[1..].iter().filter_map(|line| line.split_once(": "));
    let headers: HashMap<_, _> = headers
        .map(|(name, value)| (name.to_ascii_lowercase(), value.to_owned()))
        .collect();
    let (path, query) = target.split_once('?').unwrap_or((target, ""));
    let query = query.split('&').filter_map(|one| one.split_once('='));
    let length = headers.get("content-length").map_or("0", String::as_str);
    let mut body = vec![0; length.parse().unwrap()];
    reader.read_exact(&mut body).ok()?;
    Some(Request {
        method,
        name: name(path),
        query: query
            .map(|(key, value)| (key.to_owned(), plain(value)))
            .collect(),
        headers,
        body,
    })
}

/// The name after the bucket.
fn name(path: &str) -> String {
    let path = path.trim_start_matches('/');
    plain(path.split_once('/').map_or("", |(_, name)| name))
}

fn plain(text: &str) -> String {
    let mut parts = text.split('%');
    let first = parts.next().unwrap_or_default().to_owned();
    parts.fold(first, |all, part| {
        let code = u8::from_str_radix(&part[..2], 16).unwrap();
        all + &char::from(code).to_string() + &part[2..]
    })
}

fn respond(request: &Request, objects: &Mutex<Objects>) -> Answer {
    let has = |name: &str, value: &str| request.headers.get(name).is_some_and(|of| of == value);
    if !request.headers.contains_key("authorization") {
        return answer(403, "<Error><Code>AccessDenied</Code></Error>");
    }
    let mut objects = objects.lock().unwrap();
    match (request.method.as_str(), request.name.as_str()) {
        ("GET", "") => list(request, &objects),
        ("POST", "") => remove_many(request, &mut objects),
        ("PUT", name) => {
            let is_azure = request.headers.contains_key("x-ms-version");
            if is_azure && !has("x-ms-blob-type", "BlockBlob") {
                return answer(400, "<Error><Code>MissingRequiredHeader</Code></Error>");
            }
            if objects.contains_key(name) && has("x-goog-if-generation-match", "0") {
                return answer(412, "<Error><Code>PreconditionFailed</Code></Error>");
            }
            if objects.contains_key(name) && has("if-none-match", "*") {
                return answer(409, "<Error><Code>BlobAlreadyExists</Code></Error>");
            }
            let object = (request.body.clone(), SystemTime::now());
            objects.insert(name.to_owned(), object);
            let headers = vec![("etag", "\"0\"".to_owned())];
            Answer {
                headers,
                ..answer(if is_azure { 201 } else { 200 }, "")
            }
        }
        ("DELETE", name) => answer(removed(name, &mut objects), ""),
        (_, name) => match objects.get(name) {
            Some((bytes, modified)) => get(request, bytes, *modified),
            None => answer(404, "<Error><Code>NoSuchKey</Code></Error>"),
        },
    }
}

/// The status of a removal. The first removal of `fails-once` fails, and the object stays.
fn removed(name: &str, objects: &mut Objects) -> u16 {
    match objects.get_mut(name) {
        Some((_, modified)) if name.ends_with("/fails-once") && *modified != UNIX_EPOCH => {
            *modified = UNIX_EPOCH;
            500
        }
        Some(_) => {
            objects.remove(name);
            204
        }
        None => 404,
    }
}

fn get(request: &Request, bytes: &[u8], modified: SystemTime) -> Answer {
    let range = request.headers.get("range");
    let range = range.and_then(|range| range.strip_prefix("bytes=")?.split_once('-'));
    let headers = |range| {
        let mut headers = vec![
            ("etag", "\"0\"".to_owned()),
            ("last-modified", date(modified).0),
        ];
        headers.extend(range);
        headers
    };
    let Some((first, last)) = range else {
        return Answer {
            headers: headers(None),
            ..answer(200, bytes)
        };
    };
    let first: usize = first.parse().unwrap();
    let end = (last.parse::<usize>().unwrap() + 1).min(bytes.len());
    if first >= end {
        return answer(416, "");
    }
    let of = format!("bytes {first}-{}/{}", end - 1, bytes.len());
    Answer {
        headers: headers(Some(("content-range", of))),
        ..answer(206, &bytes[first..end])
    }
}

fn list(request: &Request, objects: &Objects) -> Answer {
    let of = |name: &str| request.query.get(name).map_or("", String::as_str);
    let is_azure = of("comp") == "list";
    let after = of(if is_azure {
        "marker"
    } else {
        "continuation-token"
    });
    let mut found = (objects.iter())
        .filter(|(name, _)| name.starts_with(of("prefix")) && name.as_str() > after)
        .peekable();
    let (mut text, mut last) = (String::new(), "");
    for (name, (bytes, modified)) in found.by_ref().take(PAGE) {
        let (rfc1123, iso) = date(*modified);
        let len = bytes.len();
        text += &if is_azure {
            format!(
                "<Blob><Name>{name}</Name><Properties><Last-Modified>{rfc1123}</Last-Modified><Etag>0</Etag>\
                 <Content-Length>{len}</Content-Length><Content-Type>x</Content-Type></Properties></Blob>"
            )
        } else {
            format!(
                "<Contents><Key>{name}</Key><LastModified>{iso}</LastModified><ETag>0</ETag><Size>{len}</Size></Contents>"
            )
        };
        last = name;
    }
    let more = found.peek().is_some();
    let body = match (is_azure, more) {
        (true, true) => format!(
            "<EnumerationResults><Blobs>{text}</Blobs><NextMarker>{last}</NextMarker></EnumerationResults>"
        ),
        (true, false) => {
            format!("<EnumerationResults><Blobs>{text}</Blobs><NextMarker /></EnumerationResults>")
        }
        (false, true) => format!(
            "<ListBucketResult>{text}<NextContinuationToken>{last}</NextContinuationToken></ListBucketResult>"
        ),
        (false, false) => format!("<ListBucketResult>{text}</ListBucketResult>"),
    };
    answer(200, body)
}

/// Azure's removal of several blobs in one request. Each blob has its own request and answer inside.
fn remove_many(request: &Request, objects: &mut Objects) -> Answer {
    let text = String::from_utf8_lossy(&request.body);
    let (mut body, mut id) = (String::new(), "");
    for line in text.lines() {
        if let Some((key, value)) = line.split_once(": ")
            && key.eq_ignore_ascii_case("content-id")
        {
            id = value;
        } else if let Some(target) = line.strip_prefix("DELETE ") {
            let path = target.split(' ').next().unwrap();
            let status = removed(&name(path), objects);
            body += &format!(
                "--b\r\nContent-Type: application/http\r\nContent-ID: {id}\r\n\r\nHTTP/1.1 {status} x\r\nx: y\r\n\r\n"
            );
        }
    }
    let kind = "multipart/mixed; boundary=b".to_owned();
    Answer {
        headers: vec![("content-type", kind)],
        ..answer(202, body + "--b--\r\n")
    }
}

/// A time in the form of headers, and in the form of lists.
fn date(time: SystemTime) -> (String, String) {
    let since = time.duration_since(UNIX_EPOCH).unwrap();
    let (days, second) = (since.as_secs() / 86_400, since.as_secs() % 86_400);
    let clock = format!(
        "{:02}:{:02}:{:02}",
        second / 3600,
        second / 60 % 60,
        second % 60
    );
    // Years begin in March here, so that the leap day is the last day of a year.
    let from = days + 719_468;
    let (era, of_era) = (from / 146_097, from % 146_097);
    let year = (of_era - of_era / 1460 + of_era / 36_524 - of_era / 146_096) / 365;
    let of_year = of_era - (365 * year + year / 4 - year / 100);
    let month = (5 * of_year + 2) / 153;
    let day = of_year - (153 * month + 2) / 5 + 1;
    let month = if month < 10 { month + 3 } else { month - 9 };
    let year = year + era * 400 + u64::from(month <= 2);
    let names = "JanFebMarAprMayJunJulAugSepOctNovDec";
    let at = (month as usize - 1) * 3;
    let weekday = ["Thu", "Fri", "Sat", "Sun", "Mon", "Tue", "Wed"][days as usize % 7];
    (
        format!(
            "{weekday}, {day:02} {} {year} {clock} GMT",
            &names[at..at + 3]
        ),
        format!(
            "{year}-{month:02}-{day:02}T{clock}.{:03}Z",
            since.subsec_millis()
        ),
    )
}

#[test]
fn every_case_of_the_contract_holds_with_the_client_of_google_cloud() {
    google("fakes::every_case", start(0).0, URL);
}

/// Runs a test in a process of its own, with a server of Google Cloud at a port.
fn google(test: &str, port: u16, of_child: &str) {
    let server = format!("http://127.0.0.1:{port}");
    let variables = [&[("GOOGLE_BASE_URL", server.as_str())], &GOOGLE[..]].concat();
    child(test, of_child, &variables);
}

/// Runs a test in a process of its own, which starts the server by [`of_child`].
pub(crate) fn with_server(test: &str) {
    let port = free_port();
    google(test, port, &port.to_string());
}

/// Starts the server at [`URL`], in a test that [`with_server`] runs.
pub(crate) fn of_child() -> Arc<Server> {
    let (_, server) = start(url_of_parent().parse().unwrap());
    server
}

#[test]
fn every_case_of_the_contract_holds_with_the_client_of_azure() {
    let server = format!("http://127.0.0.1:{}", start(0).0);
    let endpoint = [("AZURE_STORAGE_ENDPOINT", server.as_str())];
    let variables = [&endpoint, &AZURE[..]].concat();
    child("fakes::every_case", "az://container/prefix", &variables);
}

/// The tests above run this one.
#[test]
#[ignore = "a part of another test"]
fn every_case() {
    for (name, case) in crate::CASES {
        eprintln!("{name}");
        let url = format!("{}/{name}", url_of_parent());
        case(Rig::new(&url, Box::new(())).unwrap());
    }
    let rig = Rig::new(&url_of_parent(), Box::new(())).unwrap();
    let paths = ["1/a".to_owned(), "1/fails-once".to_owned()];
    for path in &paths {
        (rig.objects.put(path, &ObjectBody::bytes(b"x"), true)).unwrap();
    }
    rig.objects.delete(&paths).unwrap();
    assert_eq!(rig.objects.probe(&paths), Ok(0), "removed at last");
    let others = Rig::new(&format!("{}/others", url_of_parent()), Box::new(())).unwrap();
    crate::foreign::stay(&*others.objects, |_| ());
}
