//! The HTTP client below the clients of object stores. It follows no redirect, and no answer is larger than its request
//! allows: a store cannot fill this process's memory, nor choose the size of an allocation.

use std::future::Future;
use std::hash::{BuildHasher, RandomState};
use std::net::ToSocketAddrs;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use futures_util::StreamExt;
use http::header::{CONTENT_LENGTH, LOCATION, RANGE};
use http::response::Parts;
use http::{HeaderMap, Method, StatusCode, Uri};
use http_body::{Body, Frame};
use object_store::client::{
    ClientConfigKey, ClientOptions, HttpClient, HttpConnector, HttpError, HttpErrorKind,
    HttpRequest, HttpResponse, HttpResponseBody, HttpService,
};
use reqwest::dns::{Addrs, Name, Resolve, Resolving};
use reqwest::{Client, NoProxy, Proxy, redirect};

use super::endpoint::is_true;

const CONNECT_LIMIT: Duration = Duration::from_secs(1);
/// The module of the store has shorter limits for most requests.
const LIMIT: Duration = Duration::from_secs(120);
const IDLE: Duration = Duration::from_secs(20);

/// The most that a list may have. A parsed element takes many times the memory of its text, so the elements count, too.
#[derive(Clone, Copy, Debug)]
pub(super) struct Lists {
    bytes: u64,
    tags: u32,
}

/// 1,000 objects in each answer of S3 and of Google Cloud.
pub(super) const OF_THOUSAND: Lists = Lists {
    bytes: 2 << 20,
    tags: 50_000,
};
/// 5,000 objects in each answer of Azure, with more than twenty elements each.
pub(super) const OF_AZURE: Lists = Lists {
    bytes: 5 << 20,
    tags: 250_000,
};
/// Most elements of a list inside each other.
const DEPTH_MAX: u32 = 64;
/// Most bytes of an answer that is no list: to a write, to a removal, of credentials.
const ANSWER_MAX: u64 = 1 << 20;
/// Bytes of an error's text that are read.
const ERROR_MAX: usize = 64 << 10;

/// Makes the clients of a store with such lists.
#[derive(Debug)]
pub(super) struct Connector(pub(super) Lists);

impl HttpConnector for Connector {
    fn connect(&self, options: &ClientOptions) -> object_store::Result<HttpClient> {
        let client = build(options).map_err(|source| object_store::Error::Generic {
            store: "HTTP client",
            source: Box::new(source),
        })?;
        Ok(HttpClient::new(Bounded(HttpClient::new(client), self.0)))
    }
}

/// The client with the settings of the environment.
fn build(options: &ClientOptions) -> reqwest::Result<Client> {
    let of = |key| options.get_config_value(&key);
    let allows_http = of(ClientConfigKey::AllowHttp).is_some_and(|value| is_true(&value));
    let agent = of(ClientConfigKey::UserAgent);
    let mut builder = Client::builder()
        .redirect(redirect::Policy::none())
        .https_only(!allows_http)
        .http1_only()
        .user_agent(
            agent.unwrap_or_else(|| concat!("undercroft/", env!("CARGO_PKG_VERSION")).into()),
        )
        .dns_resolver(Arc::new(Spread))
        .connect_timeout(CONNECT_LIMIT)
        .timeout(LIMIT)
        .pool_idle_timeout(IDLE);
    if let Some(url) = of(ClientConfigKey::ProxyUrl) {
        let excluded = of(ClientConfigKey::ProxyExcludes);
        let excluded = excluded.and_then(|hosts| NoProxy::from_string(&hosts));
        builder = builder.proxy(Proxy::all(url)?.no_proxy(excluded));
    }
    if let Some(root) = of(ClientConfigKey::ProxyCaCertificate) {
        let root = reqwest::tls::Certificate::from_pem(root.as_bytes())?;
        builder = builder.tls_certs_merge([root]);
    }
    builder.build()
}

/// Finds the addresses of a host. Each connection begins with another one, so that all servers of a store are used.
#[derive(Debug)]
struct Spread;

impl Resolve for Spread {
    fn resolve(&self, name: Name) -> Resolving {
        Box::pin(async move {
            let found = tokio::task::spawn_blocking(move || {
                let found = (name.as_str(), 0).to_socket_addrs()?;
                std::io::Result::Ok(found.collect::<Vec<_>>())
            });
            let mut found = found.await??;
            let first = RandomState::new().hash_one(0) as usize % found.len().max(1);
            found.rotate_left(first);
            Ok(Box::new(found.into_iter()) as Addrs)
        })
    }
}

/// An answer that is refused.
#[derive(Debug, thiserror::Error)]
enum Refusal {
    #[error(
        "the store answers with {0} bytes or more, but the request allows {1} at most; check that the address is one of such a \
         store"
    )]
    TooLong(u64, u64),
    #[error("the store's answer is not a list of objects: it has too many elements")]
    TooManyElements,
    #[error(
        "the store redirects to {1} ({0}), which is not followed; set the address and the region of the bucket"
    )]
    Redirect(StatusCode, String),
}

impl From<Refusal> for HttpError {
    fn from(refusal: Refusal) -> Self {
        Self::new(HttpErrorKind::Decode, refusal)
    }
}

/// A client whose answers are bounded.
#[derive(Debug)]
struct Bounded(HttpClient, Lists);

type Answering<'a> = Pin<Box<dyn Future<Output = Result<HttpResponse, HttpError>> + Send + 'a>>;

impl HttpService for Bounded {
    fn call<'a, 'b>(&'a self, request: HttpRequest) -> Answering<'b>
    where
        'a: 'b,
        Self: 'b,
    {
        let most = most(request.method(), request.headers(), self.1);
        Box::pin(async move {
            let (head, body) = self.0.execute(request).await?.into_parts();
            if head.status.is_success() {
                return bounded(head, body, most);
            }
            if head.status.is_redirection() && head.status != StatusCode::NOT_MODIFIED {
                let to = host(&head.headers);
                return Err(Refusal::Redirect(head.status, to).into());
            }
            let text = text(body).await;
            Ok(HttpResponse::from_parts(head, text.into()))
        })
    }
}

/// The most that a successful answer may have; `None` if it has no body.
fn most(method: &Method, headers: &HeaderMap, lists: Lists) -> Option<(u64, Option<Elements>)> {
    let range = headers.get(RANGE).and_then(|range| {
        let (first, last) = range
            .to_str()
            .ok()?
            .strip_prefix("bytes=")?
            .split_once('-')?;
        let (first, last): (u64, u64) = (first.parse().ok()?, last.parse().ok()?);
        (last + 1).checked_sub(first)
    });
    match *method {
        Method::HEAD => None,
        Method::GET => Some(match range {
            Some(bytes) => (bytes, None),
            None => (lists.bytes, Some(Elements::of(lists))),
        }),
        _ => Some((ANSWER_MAX, Some(Elements::of(lists)))),
    }
}

fn bounded(
    head: Parts,
    body: HttpResponseBody,
    most: Option<(u64, Option<Elements>)>,
) -> Result<HttpResponse, HttpError> {
    let Some((most, elements)) = most else {
        return Ok(HttpResponse::from_parts(head, body));
    };
    let named = head.headers.get(CONTENT_LENGTH);
    let named = named.and_then(|value| value.to_str().ok()?.parse::<u64>().ok());
    if let Some(named) = named.filter(|named| *named > most) {
        return Err(Refusal::TooLong(named, most).into());
    }
    let body = HttpResponseBody::new(BoundedBody {
        body,
        most,
        taken: 0,
        elements,
    });
    Ok(HttpResponse::from_parts(head, body))
}

/// A body that fails after its limit. It does not tell its size, by which a reader would allocate memory.
struct BoundedBody {
    body: HttpResponseBody,
    most: u64,
    taken: u64,
    /// The elements of an answer that is parsed.
    elements: Option<Elements>,
}

/// Counts the elements of an answer in XML.
#[derive(Clone, Debug)]
struct Elements {
    left: u32,
    depth: u32,
    last: u8,
    /// The first byte of the text, after spaces and the mark of its encoding.
    first: Option<u8>,
}

impl Elements {
    fn of(lists: Lists) -> Self {
        Self {
            left: lists.tags,
            depth: 0,
            last: 0,
            first: None,
        }
    }

    /// Whether the answer is not in XML, as all lists are.
    fn is_other(&self) -> bool {
        self.first.is_some_and(|byte| byte != b'<')
    }

    /// Counts the bytes that follow. Returns false if there are too many elements, or too many inside each other.
    fn take(&mut self, bytes: &[u8]) -> bool {
        if self.first.is_none() {
            let is_mark = |byte: u8| byte.is_ascii_whitespace() || b"\xef\xbb\xbf".contains(&byte);
            self.first = bytes.iter().copied().find(|&byte| !is_mark(byte));
        }
        for &byte in bytes {
            match (self.last, byte) {
                (b'<', b'/') | (b'/', b'>') => self.depth = self.depth.saturating_sub(1),
                (b'<', b'?' | b'!') => {}
                (b'<', _) => self.depth += 1,
                _ => {}
            }
            if byte == b'<' {
                let Some(left) = self.left.checked_sub(1) else {
                    return false;
                };
                self.left = left;
            }
            self.last = byte;
        }
        self.depth <= DEPTH_MAX
    }
}

impl Body for BoundedBody {
    type Data = <HttpResponseBody as Body>::Data;
    type Error = HttpError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Self::Data>, HttpError>>> {
        let polled = Pin::new(&mut self.body).poll_frame(context);
        if let Poll::Ready(Some(Ok(frame))) = &polled {
            let bytes = frame.data_ref().map_or(&[][..], |bytes| bytes);
            self.taken += bytes.len() as u64;
            let elements = self.elements.as_mut();
            let is_list = elements.is_none_or(|elements| elements.take(bytes));
            if self.elements.as_ref().is_some_and(Elements::is_other) {
                self.most = self.most.min(ANSWER_MAX);
            }
            if self.taken > self.most {
                return Poll::Ready(Some(Err(Refusal::TooLong(self.taken, self.most).into())));
            }
            if !is_list {
                return Poll::Ready(Some(Err(Refusal::TooManyElements.into())));
            }
        }
        polled
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }
}

/// The first bytes of an error's text. The status counts, even if the text does not arrive.
async fn text(body: HttpResponseBody) -> String {
    let mut stream = body.bytes_stream();
    let mut text = Vec::new();
    while let Some(Ok(bytes)) = stream.next().await {
        let room = ERROR_MAX - text.len();
        text.extend_from_slice(&bytes[..bytes.len().min(room)]);
        if text.len() == ERROR_MAX {
            break;
        }
    }
    String::from_utf8_lossy(&text).into_owned()
}

/// The host of a redirect, for a message.
fn host(headers: &HeaderMap) -> String {
    let to = headers.get(LOCATION).and_then(|to| to.to_str().ok());
    let to = to.and_then(|to| to.parse::<Uri>().ok());
    let host = to.as_ref().and_then(|to| to.host());
    host.unwrap_or("another address").to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn elements_are_counted_by_number_and_depth() {
        let takes = |text: &str| {
            let mut elements = Elements::of(OF_THOUSAND);
            // Pieces may end anywhere.
            text.as_bytes().chunks(3).all(|piece| elements.take(piece))
        };
        assert!(takes(
            &"<Contents><Key>a/b</Key><Size/></Contents>\n".repeat(8_000)
        ));
        assert!(!takes(
            &"<Contents><Key>a/b</Key><Size/></Contents>\n".repeat(11_000)
        ));
        assert!(takes(&"<a>".repeat(64)) && !takes(&"<a>".repeat(65)));
        assert!(takes("<?xml version='1.0'?><!-- a --><a><b></b></a>"));
    }

    #[test]
    fn only_xml_may_be_as_long_as_a_list() {
        let is_other = |text: &[u8]| {
            let mut elements = Elements::of(OF_THOUSAND);
            text.chunks(2).for_each(|piece| {
                elements.take(piece);
            });
            elements.is_other()
        };
        for list in [&b"<a>"[..], b"\xef\xbb\xbf<?xml", b"\r\n\t <a>"] {
            assert!(!is_other(list), "{list:?}");
        }
        for other in [&b"{\"a\": \"<\"}"[..], b"xxx", b" [1]"] {
            assert!(is_other(other), "{other:?}");
        }
    }
}
