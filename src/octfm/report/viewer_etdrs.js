// ETDRS zones of a thickness map by the definitions of octfm.volume.etdrs and octfm.layers.segment; tests compare the two.
"use strict";
const octfmEtdrs = (() => {
  // numpy.arange
  const range = (start, stop, step) => {
    const count = Math.max(0, Math.ceil((stop - start) / step)), by = start + step - start;
    return Float64Array.from({ length: count }, (_, i) => start + i * by);
  };

  // Index i with sorted[i] <= value < sorted[i + 1], between 0 and length - 2.
  function below(sorted, value) {
    let low = 0, high = sorted.length - 1;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (sorted[middle] <= value) low = middle; else high = middle;
    }
    return low;
  }

  // Values [D * W] at points of the fundus, bilinear; NaN outside the field and next to an A-scan without a value.
  function sample(values, field, xs, ys) {
    const depth = field.bscans.length, width = field.columns, found = new Float64Array(xs.length * ys.length).fill(NaN);
    const first = field.bscans[0], last = field.bscans[depth - 1], margin = (last - first) / (depth - 1) / 2;
    for (let j = 0; j < ys.length; j++) for (let i = 0; i < xs.length; i++) {
      const ox = xs[i] - field.origin[0], oy = ys[j] - field.origin[1];
      const along = ox * field.along[0] + oy * field.along[1], across = ox * field.across[0] + oy * field.across[1];
      if (across < first - margin || across > last + margin) continue;
      const held = Math.min(Math.max(across, first), last), d = below(field.bscans, held);
      const share = (held - field.bscans[d]) / (field.bscans[d + 1] - field.bscans[d]);
      const ascan = (along - (field.starts[d] + share * (field.starts[d + 1] - field.starts[d]))) / field.ascan;
      if (!(ascan >= -0.5 && ascan <= width - 0.5)) continue;
      const at = Math.min(Math.max(ascan, 0), width - 1), w = Math.min(Math.floor(at), Math.max(width - 2, 0)), right = at - w;
      let sum = 0, known = 0;
      for (const [dd, across1] of [[d, 1 - share], [d + 1, share]]) for (const [ww, along1] of [[w, 1 - right], [Math.min(w + 1, width - 1), right]]) {
        const value = values[dd * width + ww], weight = across1 * along1;
        if (value === value) { sum += weight * value; known += weight; }
      }
      if (known >= 0.999) found[j * xs.length + i] = sum;
    }
    return found;
  }

  // scipy.ndimage.gaussian_filter of a square of n x n.
  function smoothed(values, n, sigma) {
    const radius = Math.floor(4 * sigma + 0.5), kernel = [];
    let total = 0;
    for (let k = -radius; k <= radius; k++) { kernel.push(Math.exp(-0.5 * (k / sigma) ** 2)); total += kernel[k + radius]; }
    const reflect = (i) => { while (i < 0 || i >= n) i = i < 0 ? -1 - i : 2 * n - 1 - i; return i; };
    let from = values;
    for (const [step, stride] of [[n, 1], [1, n]]) {
      const to = new Float64Array(n * n);
      for (let line = 0; line < n; line++) for (let i = 0; i < n; i++) {
        let sum = 0;
        for (let k = -radius; k <= radius; k++) sum += kernel[k + radius] * from[line * stride + reflect(i + k) * step];
        to[line * stride + i * step] = sum / total;
      }
      from = to;
    }
    return from;
  }

  // Depressions that could be the pit, the likeliest first: [x, y] in mm.
  function findPits(thickness, field, rules) {
    const reach = 1.5, half = reach + 1.25, cell = rules.cell, axis = range(-half, half + cell, cell), n = axis.length;
    const xs = axis.map((v) => field.centre[0] + v), ys = axis.map((v) => field.centre[1] + v);
    const measured = sample(thickness, field, xs, ys), known = measured.map((v) => v === v ? 1 : 0);
    if (known.reduce((a, b) => a + b, 0) / known.length < 0.5) return [];
    const weight = smoothed(known, n, 0.1 / cell), smooth = smoothed(measured.map((v) => v === v ? v : 0), n, 0.1 / cell);
    for (let i = 0; i < n * n; i++) smooth[i] = weight[i] < 0.5 ? NaN : smooth[i] / Math.max(weight[i], 1e-6);
    const depth = new Float64Array(n * n).fill(Infinity), total = new Float64Array(n * n);
    for (let turn = 0; turn < 8; turn++) {
      const angle = turn * Math.PI / 4;
      const steps = [0.6, 0.9, 1.2].map((r) => [Math.round(r * Math.sin(angle) / cell), Math.round(r * Math.cos(angle) / cell)]);
      for (let row = 0; row < n; row++) for (let column = 0; column < n; column++) {
        let ring = NaN;
        for (const [down, right] of steps) {
          const r = row + down, c = column + right;
          if (r < 0 || r >= n || c < 0 || c >= n) continue;
          const value = smooth[r * n + c];
          if (value === value && !(ring >= value)) ring = value;
        }
        const i = row * n + column, rise = ring - smooth[i];
        if (rise === rise) { depth[i] = Math.min(depth[i], rise); total[i] += rise; }
      }
    }
    const score = new Float64Array(n * n), weighted = new Float64Array(n * n);
    let most = 0;
    for (let i = 0; i < n * n; i++) {
      const off = Math.hypot(xs[i % n] - field.centre[0], ys[Math.floor(i / n)] - field.centre[1]);
      if (off > reach || smooth[i] !== smooth[i] || depth[i] < rules.pit) continue;
      score[i] = total[i];
      weighted[i] = total[i] * Math.exp(-0.5 * (off / rules.offCentre) ** 2);
      most = Math.max(most, weighted[i]);
    }
    if (!(most > 0)) return [];
    const near = Math.round(rules.apart / cell), peaks = [];
    for (let i = 0; i < n * n; i++) {
      if (weighted[i] < rules.rival * most) continue;
      const row = Math.floor(i / n), column = i % n;
      let highest = true;
      for (let r = Math.max(0, row - near); highest && r <= Math.min(n - 1, row + near); r++)
        for (let c = Math.max(0, column - near); c <= Math.min(n - 1, column + near); c++)
          if (weighted[r * n + c] > weighted[i]) { highest = false; break; }
      if (highest) peaks.push(i);
    }
    peaks.sort((a, b) => weighted[b] - weighted[a] || a - b);
    const places = [];
    for (const peak of peaks) {
      const px = xs[peak % n], py = ys[Math.floor(peak / n)];
      let sum = 0, sx = 0, sy = 0;
      for (let i = 0; i < n * n; i++) {
        const x = xs[i % n], y = ys[Math.floor(i / n)], part = score[i] - 0.85 * score[peak];
        if (part > 0 && Math.hypot(x - px, y - py) <= 0.4) { sum += part; sx += part * x; sy += part * y; }
      }
      const place = [sx / sum, sy / sum];
      if (places.every((other) => Math.hypot(place[0] - other[0], place[1] - other[1]) >= rules.apart)) places.push(place);
    }
    return places;
  }

  // Which zone each point of the grid around the fovea lies in, -1 beyond 3 mm.
  function zonesOf(field, rules) {
    const [a, b, c] = rules.rings, axis = range(-c + rules.cell / 2, c, rules.cell), n = axis.length, [right, left] = rules.sides;
    const sides = field.upright ? ["superior", "inferior", right, left] : [right, left];
    let names = ["centre", ...["inner", "outer"].flatMap((ring) => sides.map((side) => `${ring} ${side}`))];
    const order = (name) => { const at = rules.zones.indexOf(name); return at < 0 ? rules.zones.length : at; };
    names = names.map((name, i) => [name, i]).sort((x, y) => order(x[0]) - order(y[0]) || x[1] - y[1]).map(([name]) => name);
    const zone = new Int8Array(n * n).fill(-1), whole = new Uint8Array(n * n);
    for (let j = 0; j < n; j++) for (let i = 0; i < n; i++) {
      const x = axis[i], y = axis[j], r = Math.hypot(x, y);
      whole[j * n + i] = r < c ? 1 : 0;
      const side = Math.abs(x) > Math.abs(y) ? (x > 0 ? right : left) : y < 0 ? "superior" : "inferior";
      const name = r < a ? "centre" : r < b ? `inner ${side}` : r < c ? `outer ${side}` : "";
      zone[j * n + i] = names.indexOf(name);
    }
    return { axis, names, zone, whole };
  }

  // Means of a map [D * W] in the zones around a place; null where less than 90 % was measured.
  function meansAt(values, field, rules, centre) {
    const { axis, names, zone, whole } = field.grid ||= zonesOf(field, rules), count = names.length;
    const found = sample(values, field, axis.map((v) => centre[0] + v), axis.map((v) => centre[1] + v));
    const sum = new Float64Array(count), known = new Float64Array(count), size = new Float64Array(count);
    let allSum = 0, allKnown = 0, all = 0;
    for (let i = 0; i < found.length; i++) {
      if (!whole[i]) continue;
      const value = found[i], z = zone[i], here = value === value;
      all++;
      if (here) { allSum += value; allKnown++; }
      if (z < 0) continue;
      size[z]++;
      if (here) { sum[z] += value; known[z]++; }
    }
    const mean = {}, coverage = {}, area = Math.PI * rules.rings[2] ** 2;
    names.forEach((name, z) => {
      coverage[name] = known[z] / size[z];
      mean[name] = coverage[name] >= rules.covered ? sum[z] / known[z] : null;
    });
    return { mean, coverage, volume: allKnown / all >= rules.covered ? allSum / allKnown / 1000 * area : null };
  }

  // The grid of a thickness map, around the pit of `pitMap`, without the zones that cannot be trusted.
  function measure(thickness, pitMap, expected, field, rules) {
    const [pit, ...rivals] = findPits(pitMap, field, rules), centre = pit || field.centre;
    const raw = meansAt(thickness, field, rules, centre), error = meansAt(expected, field, rules, centre), withheld = new Set();
    for (const name of Object.keys(raw.mean)) if ((error.mean[name] || 0) > rules.zoneUm) withheld.add(name);
    for (const rival of rivals) {
      const other = meansAt(thickness, field, rules, rival).mean;
      for (const [name, mean] of Object.entries(raw.mean))
        if (mean !== null && !(other[name] !== null && Math.abs(mean - other[name]) <= rules.placeUm)) withheld.add(name);
    }
    const trusted = (error.volume || 0) * 1000 / (Math.PI * rules.rings[2] ** 2) <= rules.zoneUm;
    const mean = Object.fromEntries(Object.entries(raw.mean).map(([name, value]) => [name, withheld.has(name) ? null : value]));
    return { mean, coverage: raw.coverage, volume: trusted ? raw.volume : null, centre, onPit: Boolean(pit), withheld: [...withheld] };
  }

  return { measure, meansAt, findPits, sample };
})();
