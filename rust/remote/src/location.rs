//! The URL of a remote store.

use std::fmt;

use crate::redact::{redacted, redacted_url};

mod mooncake;

pub(crate) use mooncake::MooncakePlace;

/// The kinds of stores.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scheme {
    /// A directory, often on a shared file system.
    File,
    /// Amazon S3, and stores with its protocol.
    S3,
    /// Google Cloud Storage.
    Gs,
    /// Azure Blob Storage.
    Az,
    /// Redis or Valkey: one server, or a cluster.
    Redis,
    /// Redis or Valkey over TLS.
    Rediss,
    /// A Mooncake store.
    Mooncake,
}

impl Scheme {
    /// The name in a URL.
    pub(crate) fn name(self) -> &'static str {
        let found = SCHEMES.iter().find(|(_, scheme, _)| *scheme == self);
        found.map_or("", |(name, ..)| *name)
    }
}

/// Names of the schemes, with an example of each.
const SCHEMES: [(&str, Scheme, &str); 7] = [
    ("file", Scheme::File, "file:///mnt/shared/undercroft"),
    ("s3", Scheme::S3, "s3://bucket/prefix"),
    ("gs", Scheme::Gs, "gs://bucket/prefix"),
    ("az", Scheme::Az, "az://container/prefix"),
    ("redis", Scheme::Redis, "redis://host:6379/0"),
    ("rediss", Scheme::Rediss, "rediss://host:6379/0"),
    ("mooncake", Scheme::Mooncake, "mooncake://host:50051/prefix"),
];

const CREDENTIALS: &str = "credentials in the URL, which is logged; leave them out and set them in the environment, such \
     as REDIS_PASSWORD or AWS_ACCESS_KEY_ID";
const BUCKET: &str = "the name of a bucket or container has letters, digits, '-', '.' and '_' only. A key and its secret \
     are set in the environment, such as AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, and so is the store's address, such \
     as AWS_ENDPOINT_URL. Allowed: s3://bucket/prefix, gs://bucket/prefix, az://container/prefix";

const PORT: &str = "a port that is no number up to 65535. Set a password in the environment, such as REDIS_PASSWORD. \
     Allowed: redis://host:6379/0, rediss://host:6379/0, mooncake://host:50051/prefix";

/// A URL or a store's configuration cannot be used. The message names the URL, the allowed forms and the remedy. It
/// never has a password.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct LocationError(pub String);

/// Where a remote store is.
///
/// ```
/// use undercroft_remote::{Location, Scheme};
///
/// let bucket = Location::parse("s3://bucket/team/a")?;
/// assert_eq!((bucket.scheme, bucket.host.as_str(), bucket.path.as_str()), (Scheme::S3, "bucket", "team/a"));
/// // Credentials come from the environment: a URL is logged, and a refusal does not repeat them.
/// let refused = Location::parse("redis://user:secret@host/0").unwrap_err();
/// assert!(!refused.to_string().contains("secret"), "{refused}");
/// # Ok::<(), undercroft_remote::LocationError>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Location {
    /// The kind of store.
    pub scheme: Scheme,
    /// The bucket, the container, or servers as `host` or `host:port` with commas between; empty for a directory.
    pub host: String,
    /// The directory, or the prefix of all names, without `/` at its ends.
    pub path: String,
    /// The parameters of a Mooncake store, as in the URL; empty for other stores.
    pub query: String,
}

/// The servers of a Redis, and the place of undercroft's keys there.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct RedisPlace {
    /// Host and port: one server, or some of a cluster.
    pub(crate) servers: Vec<(String, u16)>,
    /// Number of the database. A cluster has only number 0.
    pub(crate) database: i64,
    /// Prefix of all keys, without the following `/`.
    pub(crate) prefix: String,
}

impl Location {
    /// Reads a URL.
    ///
    /// # Errors
    /// Names the mistake and the allowed forms.
    pub fn parse(url: &str) -> Result<Self, LocationError> {
        let refused = |reason: &str| {
            let shown = redacted_url(url);
            let examples = SCHEMES.map(|(_, _, example)| example).join(", ");
            LocationError(format!(
                "remote is {shown:?}: {reason}. Allowed: {examples}"
            ))
        };
        let Some((scheme, rest)) = url.split_once("://") else {
            return Err(refused("no URL"));
        };
        let Some((_, scheme, _)) = SCHEMES.iter().find(|(name, ..)| *name == scheme) else {
            return Err(refused("an unknown scheme"));
        };
        if *scheme == Scheme::File {
            return directory(rest).map_err(refused);
        }
        // A secret may have a slash: it may stand anywhere before the `@`.
        if rest.contains('@') {
            return Err(refused(CREDENTIALS));
        }
        // A URL of another kind with a `?` is refused below.
        let (rest, query) = match scheme {
            Scheme::Mooncake => rest.split_once('?').unwrap_or((rest, "")),
            _ => (rest, ""),
        };
        if rest.contains(['?', '#']) {
            return Err(refused(
                "parameters; endpoint, region and the like come from the environment, such as AWS_ENDPOINT_URL",
            ));
        }
        let (host, path) = rest.split_once('/').unwrap_or((rest, ""));
        if host.is_empty() {
            return Err(refused("no host or bucket"));
        }
        if matches!(scheme, Scheme::S3 | Scheme::Gs | Scheme::Az) && !is_bucket(host) {
            // The name may be a key and its secret, so that it is not shown.
            return Err(LocationError(format!(
                "remote is \"{}://...\": {BUCKET}",
                scheme.name()
            )));
        }
        let path = path.trim_matches('/');
        let is_plain = |name: &str| !name.is_empty() && name != "." && name != "..";
        if !path.is_empty() && !path.split('/').all(is_plain) {
            return Err(refused("a prefix with an empty name, \".\" or \"..\""));
        }
        let found = Self {
            scheme: *scheme,
            host: host.to_owned(),
            path: path.to_owned(),
            query: query.to_owned(),
        };
        let refused = |reason: &str| match reason {
            // The port may be a password, so that it is not shown.
            PORT => LocationError(format!("remote is \"{}://...\": {PORT}", scheme.name())),
            reason => refused(reason),
        };
        if *scheme == Scheme::Mooncake {
            MooncakePlace::of(&found).map_err(|error| refused(&error))?;
        }
        if matches!(scheme, Scheme::Redis | Scheme::Rediss) {
            found.redis().map_err(refused)?;
        }
        Ok(found)
    }

    /// The servers, the database and the prefix of a Redis.
    pub(crate) fn redis(&self) -> Result<RedisPlace, &'static str> {
        let servers: Result<_, _> = self.host.split(',').map(redis_server).collect();
        let (database, prefix) = self
            .path
            .split_once('/')
            .unwrap_or((self.path.as_str(), ""));
        let database = match database {
            "" => 0,
            number => number
                .parse()
                .ok()
                .filter(|number| *number >= 0)
                .ok_or("a database that is no number; a prefix comes after it, as in redis://host/0/prefix")?,
        };
        let prefix = if prefix.is_empty() {
            "undercroft"
        } else {
            prefix
        };
        Ok(RedisPlace {
            servers: servers?,
            database,
            prefix: prefix.to_owned(),
        })
    }

    /// The error that this store cannot be used.
    pub(crate) fn refused(&self, reason: impl fmt::Display) -> LocationError {
        LocationError(format!(
            "remote is \"{self}\": {}",
            redacted(&reason.to_string())
        ))
    }
}

impl fmt::Display for Location {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = self.scheme.name();
        match self.scheme {
            Scheme::File => write!(f, "file://{}", self.path),
            _ if self.path.is_empty() => write!(f, "{name}://{}", self.host),
            _ => write!(f, "{name}://{}/{}", self.host, self.path),
        }?;
        match self.query.as_str() {
            "" => Ok(()),
            query => write!(f, "?{query}"),
        }
    }
}

/// Whether a name may be one of a bucket or a container: letters, digits, `-`, `.` and `_`.
fn is_bucket(name: &str) -> bool {
    let is_allowed = |of: char| of.is_ascii_alphanumeric() || ['-', '.', '_'].contains(&of);
    name.chars().all(is_allowed)
}

/// Host and port of a Redis server.
fn redis_server(text: &str) -> Result<(String, u16), &'static str> {
    host_and_port(text, 6379)
}

/// Host and port of a server that has this port if none is named.
pub(crate) fn host_and_port(text: &str, port: u16) -> Result<(String, u16), &'static str> {
    let (host, port) = match text.rsplit_once(':') {
        // An IPv6 address without a port ends with its bracket.
        Some((host, named)) if !named.ends_with(']') => (host, named.parse().map_err(|_| PORT)?),
        _ => (text, port),
    };
    match host.trim_matches(['[', ']']) {
        "" => Err("a server without a host"),
        host => Ok((host.to_owned(), port)),
    }
}

/// Whether a host is this machine, by its name or address.
#[cfg(any(feature = "s3", feature = "redis"))]
pub(crate) fn is_this_machine(host: &str) -> bool {
    let address = host.trim_matches(['[', ']']).parse::<std::net::IpAddr>();
    host == "localhost" || address.is_ok_and(|address| address.is_loopback())
}

fn directory(rest: &str) -> Result<Location, &'static str> {
    let path = rest.strip_prefix("localhost").unwrap_or(rest);
    if !path.starts_with('/') || path.contains('\0') {
        return Err("no absolute path; a directory has three slashes, as in file:///mnt/shared");
    }
    let path = path.trim_end_matches('/');
    if path.is_empty() {
        return Err("the root directory");
    }
    if path.split('/').any(|name| name == "..") {
        return Err("a path with \"..\"");
    }
    Ok(Location {
        scheme: Scheme::File,
        host: String::new(),
        path: path.to_owned(),
        query: String::new(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(url: &str) -> String {
        Location::parse(url).unwrap_err().to_string()
    }

    #[test]
    fn a_url_names_a_directory_a_bucket_or_a_server() {
        let of = |url: &str| Location::parse(url).unwrap();
        assert_eq!(of("file:///mnt/a b/").path, "/mnt/a b");
        let bucket = of("s3://bucket/a/b/");
        assert_eq!(
            (bucket.host.as_str(), bucket.path.as_str()),
            ("bucket", "a/b")
        );
        assert_eq!(bucket.to_string(), "s3://bucket/a/b");
        assert_eq!(of("gs://bucket").to_string(), "gs://bucket");
        let redis = |url: &str| of(url).redis().unwrap();
        let place = |servers: &[(&str, u16)], database, prefix: &str| RedisPlace {
            servers: (servers.iter())
                .map(|(host, port)| ((*host).to_owned(), *port))
                .collect(),
            database,
            prefix: prefix.to_owned(),
        };
        let default = || place(&[("h", 6379)], 0, "undercroft");
        assert_eq!(redis("redis://h"), default());
        assert_eq!(redis("redis://h/"), default());
        let full = place(&[("::1", 7000)], 3, "a/b");
        assert_eq!(redis("rediss://[::1]:7000/3/a/b"), full);
        assert_eq!(redis("redis://[::1]").servers[0].0, "::1");
        let cluster = place(&[("a", 7000), ("b", 6379), ("::1", 7002)], 0, "undercroft");
        assert_eq!(redis("redis://a:7000,b,[::1]:7002"), cluster);
    }

    #[test]
    fn a_wrong_url_is_shown_with_the_allowed_forms() {
        for url in [
            "/mnt/shared",
            "ftp://host/dir",
            "file://mnt/shared",
            "file:///",
            "file:///a/../b",
            "s3://",
            "s3:///prefix",
            "s3://bucket/a//b",
            "s3://bucket/../b",
            "redis://host/name",
            "redis://a:7000,,b:7000",
            "redis://a:7000,:7001",
        ] {
            let text = refused(url);
            assert!(
                text.contains(url) && text.contains("s3://bucket/prefix"),
                "{text}"
            );
        }
    }

    #[test]
    fn credentials_in_a_url_are_refused_and_not_shown() {
        for url in [
            "redis://:hunter2@host/0",
            "s3://key:hunter2@bucket/p",
            "x://a:hunter2/b@host",
            "mooncake://host/p?metadata=http://key:hunter2@other",
            "s3://AKIA:hun/hunter2@bucket/p",
            "s3://AKIA/hunter2@bucket/p",
            "gs://AKIA:hunter2/bucket",
            "az://AKIA:hunter2",
            "s3://AKIA:hunter2%40bucket/p",
            "s3://hunter2+x=/bucket",
            "az://container/p?sig=hunter2",
            "redis://user:1/0/hunter2@host",
            "file://user:hunter2@host/path",
            "s3:/AKIA:hunter2@bucket",
            "redis://:hunter2/0",
            "rediss://user:hunter2",
            "mooncake://h:hunter2/p",
            "mooncake://h/p?admin=h:hunter2",
        ] {
            let text = refused(url);
            assert!(!text.contains("hunter2"), "{text}");
        }
        assert!(refused("redis://:hunter2@host").contains("REDIS_PASSWORD"));
        assert!(refused("s3://AKIA:hunter2/p").contains("AWS_SECRET_ACCESS_KEY"));
        assert!(refused("redis://:hunter2/0").contains("REDIS_PASSWORD"));
        let parameters = refused("s3://bucket/a?region=x");
        assert!(parameters.contains("AWS_ENDPOINT_URL"), "{parameters}");
        let path = "file:///mnt/a@b?c";
        assert_eq!(Location::parse(path).unwrap().to_string(), path);
    }
}
