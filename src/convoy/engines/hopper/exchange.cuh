// Four lanes exchange four words each: word i of lane l becomes word l of lane i.
DEVICE void transpose(u32 (&v)[4], int lane) {
  bool odd = lane & 1, high = lane & 2;
  u32 a = swap_lanes(odd ? v[0] : v[1], 1), b = swap_lanes(odd ? v[2] : v[3], 1);
  if (odd) { v[0] = a; v[2] = b; } else { v[1] = a; v[3] = b; }
  a = swap_lanes(high ? v[0] : v[2], 2);
  b = swap_lanes(high ? v[1] : v[3], 2);
  if (high) { v[0] = a; v[1] = b; } else { v[2] = a; v[3] = b; }
}
