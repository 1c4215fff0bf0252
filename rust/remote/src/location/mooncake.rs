//! The parts of a Mooncake store's URL.

use super::{Location, host_and_port};

/// The ports of mooncake_master: its service, and its administration.
const MASTER_PORT: u16 = 50_051;
const ADMIN_PORT: u16 = 9003;
/// Value for no metadata server: the processes ask each other.
const PEER_TO_PEER: &str = "P2PHANDSHAKE";

/// The parameters, with examples.
const PARAMETERS: &str = "metadata=http://host:8080/metadata, segment=16GiB, protocol=rdma, device=mlx5_0, \
    host=10.0.0.7 and admin=host:9003";
const PROTOCOLS: [&str; 2] = ["tcp", "rdma"];
const UNITS: [(&str, u64); 4] = [
    ("KiB", 1 << 10),
    ("MiB", 1 << 20),
    ("GiB", 1 << 30),
    ("TiB", 1 << 40),
];

/// The servers of a store, this process's part in it, and the place of undercroft's keys there.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct MooncakePlace {
    /// Host and port of mooncake_master.
    pub(crate) master: String,
    /// Host and port of its administration, which lists keys.
    pub(crate) admin: String,
    /// The metadata server's URL, or [`PEER_TO_PEER`].
    pub(crate) metadata: String,
    /// Bytes of memory that this process lends to the store.
    pub(crate) segment: u64,
    pub(crate) protocol: String,
    /// The network cards; empty for all.
    pub(crate) device: String,
    /// This machine's address for the other machines; empty for the address on the route to the master.
    pub(crate) host: String,
    /// Prefix of all keys, without the following `/`.
    pub(crate) prefix: String,
}

impl MooncakePlace {
    /// # Errors
    /// Names the mistake and what is allowed.
    pub(crate) fn of(location: &Location) -> Result<Self, String> {
        let (host, port) = host_and_port(&location.host, MASTER_PORT)?;
        let prefix = match location.path.as_str() {
            "" => "undercroft",
            path => path,
        };
        let mut place = Self {
            master: joined(&host, port),
            admin: joined(&host, ADMIN_PORT),
            metadata: PEER_TO_PEER.to_owned(),
            segment: 0,
            protocol: PROTOCOLS[0].to_owned(),
            device: String::new(),
            host: String::new(),
            prefix: prefix.to_owned(),
        };
        for parameter in location.query.split('&').filter(|text| !text.is_empty()) {
            let (name, value) = parameter.split_once('=').unwrap_or((parameter, ""));
            place.set(name, value)?;
        }
        Ok(place)
    }

    fn set(&mut self, name: &str, value: &str) -> Result<(), String> {
        if value.is_empty() {
            return Err(format!("parameter {name:?} without a value"));
        }
        let text = value.to_owned();
        match name {
            "metadata" => self.metadata = text,
            "device" => self.device = text,
            "host" => self.host = text,
            "admin" => {
                let (host, port) = host_and_port(value, ADMIN_PORT)?;
                self.admin = joined(&host, port);
            }
            "protocol" if PROTOCOLS.contains(&value) => self.protocol = text,
            "protocol" => return Err(format!("protocol is {value:?}; allowed: tcp, rdma")),
            "segment" => {
                self.segment = size(value).ok_or_else(|| {
                    format!("segment is {value:?}; allowed: a size, such as 16GiB or 512MiB")
                })?;
            }
            _ => return Err(format!("parameter {name:?}; allowed: {PARAMETERS}")),
        }
        Ok(())
    }
}

/// A number of bytes, with or without a unit.
fn size(text: &str) -> Option<u64> {
    let of_unit = |(unit, bytes)| Some((text.strip_suffix(unit)?, bytes));
    let (number, bytes) = UNITS.into_iter().find_map(of_unit).unwrap_or((text, 1));
    number.parse::<u64>().ok()?.checked_mul(bytes)
}

fn joined(host: &str, port: u16) -> String {
    match host.contains(':') {
        true => format!("[{host}]:{port}"),
        false => format!("{host}:{port}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(url: &str) -> Result<MooncakePlace, String> {
        MooncakePlace::of(&Location::parse(url).map_err(|error| error.to_string())?)
    }

    #[test]
    fn a_url_names_the_master_and_its_parameters() {
        let place = of("mooncake://m").unwrap();
        let expected = MooncakePlace {
            master: "m:50051".to_owned(),
            admin: "m:9003".to_owned(),
            metadata: "P2PHANDSHAKE".to_owned(),
            segment: 0,
            protocol: "tcp".to_owned(),
            device: String::new(),
            host: String::new(),
            prefix: "undercroft".to_owned(),
        };
        assert_eq!(place, expected);
        let url = "mooncake://[::1]:1/a/b?metadata=http://h:8080/metadata&segment=16GiB&protocol=rdma&device=mlx5_0,mlx5_1\
            &host=10.0.0.7&admin=o:7";
        let place = of(url).unwrap();
        let expected = MooncakePlace {
            master: "[::1]:1".to_owned(),
            admin: "o:7".to_owned(),
            metadata: "http://h:8080/metadata".to_owned(),
            segment: 16 << 30,
            protocol: "rdma".to_owned(),
            device: "mlx5_0,mlx5_1".to_owned(),
            host: "10.0.0.7".to_owned(),
            prefix: "a/b".to_owned(),
        };
        assert_eq!(place, expected);
        assert_eq!(Location::parse(url).unwrap().to_string(), url);
    }

    #[test]
    fn a_wrong_parameter_is_named_with_the_allowed_values() {
        for (parameters, words) in [
            ("region=x", "\"region\"; allowed: metadata="),
            ("segment=many", "segment is \"many\"; allowed: a size"),
            ("segment=99999999999TiB", "allowed: a size"),
            ("protocol=udp", "protocol is \"udp\"; allowed: tcp, rdma"),
            ("host", "\"host\" without a value"),
            ("admin=h:x", "a port that is no number"),
        ] {
            let refused = of(&format!("mooncake://m?{parameters}")).unwrap_err();
            assert!(refused.contains(words), "{refused}");
        }
        assert!(of("mooncake://m:x").unwrap_err().contains("port"));
    }
}
