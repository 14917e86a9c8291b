//! Swap areas and the content of swap slots.

use std::ffi::OsString;
use std::os::unix::ffi::{OsStrExt as _, OsStringExt as _};

use super::{ConvertError, known, wire_enum};
use crate::state::SwapSlot;
use crate::swap::{SlotContent, SlotContents, SwapArea, SwapAreaKind};
use crate::v1;

wire_enum!(SlotContent, v1::SlotContent, "SlotContent", content: Device, Zero, Unknown);
wire_enum!(SwapAreaKind, v1::SwapAreaKind, "SwapAreaKind", kind: Partition, File);

impl From<SlotContents> for v1::SlotContentResponse {
    fn from(answer: SlotContents) -> Self {
        Self {
            slots: answer.slots.iter().map(|(slot, _)| slot.map_or(0, SwapSlot::raw)).collect(),
            contents: answer
                .slots
                .iter()
                .map(|(_, content)| v1::SlotContent::from(*content).into())
                .collect(),
            areas: answer.areas.into_iter().map(v1::SwapArea::from).collect(),
        }
    }
}

impl TryFrom<v1::SlotContentResponse> for SlotContents {
    type Error = ConvertError;

    fn try_from(answer: v1::SlotContentResponse) -> Result<Self, ConvertError> {
        let v1::SlotContentResponse { slots, contents, areas } = answer;
        if slots.len() != contents.len() {
            return Err(ConvertError::Columns { column: "contents", got: contents.len(), runs: slots.len() });
        }
        let slot = |(raw, value): (u64, i32)| {
            let slot = match raw {
                0 => None,
                _ => Some(SwapSlot::from_raw(raw).ok_or(ConvertError::Slot(raw))?),
            };
            Ok((slot, content(value)?))
        };
        Ok(Self {
            slots: slots.into_iter().zip(contents).map(slot).collect::<Result<_, ConvertError>>()?,
            areas: areas.into_iter().map(SwapArea::try_from).collect::<Result<_, _>>()?,
        })
    }
}

impl From<SwapArea> for v1::SwapArea {
    fn from(area: SwapArea) -> Self {
        Self {
            swap_type: u32::from(area.swap_type),
            kind: v1::SwapAreaKind::from(area.kind).into(),
            path: area.path.as_os_str().as_bytes().to_vec(),
            pages: area.pages,
            device_major: area.device.0,
            device_minor: area.device.1,
            inode: area.inode,
        }
    }
}

impl TryFrom<v1::SwapArea> for SwapArea {
    type Error = ConvertError;

    fn try_from(area: v1::SwapArea) -> Result<Self, ConvertError> {
        let value = u64::from(area.swap_type);
        Ok(Self {
            swap_type: u8::try_from(area.swap_type)
                .map_err(|_| ConvertError::Number { field: "swap_type", value })?,
            kind: kind(area.kind)?,
            path: OsString::from_vec(area.path).into(),
            pages: area.pages,
            device: (area.device_major, area.device_minor),
            inode: area.inode,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answer() -> SlotContents {
        let area = SwapArea {
            swap_type: 3,
            kind: SwapAreaKind::File,
            path: "/var/swap file".into(),
            pages: 1000,
            device: (259, 70_000),
            inode: 12,
        };
        let slots = vec![
            (SwapSlot::new(3, 77), SlotContent::Device),
            (None, SlotContent::Unknown),
            (SwapSlot::new(0, 1), SlotContent::Zero),
        ];
        SlotContents { slots, areas: vec![area] }
    }

    #[test]
    fn answer_survives_the_wire() {
        let wire = v1::SlotContentResponse::from(answer());
        assert_eq!(wire.slots, [3 << 58 | 77, 0, 1]);
        assert_eq!(SlotContents::try_from(wire).unwrap(), answer());
    }

    #[test]
    fn columns_of_different_length_and_invalid_values_are_rejected() {
        let wire = v1::SlotContentResponse::from(answer());
        let changed = |change: fn(&mut v1::SlotContentResponse)| {
            let mut wire = wire.clone();
            change(&mut wire);
            SlotContents::try_from(wire)
        };
        assert!(changed(|wire| wire.slots.truncate(2)).is_err());
        assert!(changed(|wire| wire.contents[0] = 0).is_err());
        assert!(changed(|wire| wire.contents[0] = 9).is_err());
        assert!(changed(|wire| wire.slots[0] = 31 << 58 | 2).is_err());
        assert!(changed(|wire| wire.areas[0].kind = 0).is_err());
        assert!(changed(|wire| wire.areas[0].swap_type = 256).is_err());
    }
}
