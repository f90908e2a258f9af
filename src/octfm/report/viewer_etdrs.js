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

  // Leaves out B-scans without a value, between two that are at most rules.bridged apart. As sample of octfm.volume.etdrs.
  function bridged(values, field, rules) {
    const { bscans, starts, columns } = field, line = (d) => values.subarray(d * columns, (d + 1) * columns);
    const seen = [...bscans.keys()].filter((d) => line(d).some((v) => v === v)), kept = new Set(bscans.keys());
    for (let i = 1; i < seen.length; i++)
      if (bscans[seen[i]] - bscans[seen[i - 1]] <= rules.bridged) for (let d = seen[i - 1] + 1; d < seen[i]; d++) kept.delete(d);
    if (kept.size === bscans.length) return [values, field];
    const left = new Float32Array(kept.size * columns);
    [...kept].forEach((d, i) => left.set(line(d), i * columns));
    return [left, { ...field, bscans: bscans.filter((_, d) => kept.has(d)), starts: starts.filter((_, d) => kept.has(d)) }];
  }

  // Values [D * W] at points of the fundus, bilinear; NaN outside the field and next to an A-scan without a value.
  function sample(given, all, xs, ys, rules) {
    const [values, field] = bridged(given, all, rules);
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

  // Point of the fundus of a fractional [B-scan, A-scan], and back: the nearest in the field.
  function placeOf([bscan, ascan], field) {
    const d = Math.min(Math.floor(bscan), field.bscans.length - 2), share = bscan - d, between = (at) => at[d] + share * (at[d + 1] - at[d]);
    const along = between(field.starts) + ascan * field.ascan, across = between(field.bscans);
    return [0, 1].map((i) => field.origin[i] + field.along[i] * along + field.across[i] * across);
  }

  function indexOf([x, y], field) {
    const ox = x - field.origin[0], oy = y - field.origin[1], { bscans, starts } = field, clamp = (v, low, high) => Math.min(Math.max(v, low), high);
    const across = clamp(ox * field.across[0] + oy * field.across[1], bscans[0], bscans[bscans.length - 1]);
    const d = below(bscans, across), share = (across - bscans[d]) / (bscans[d + 1] - bscans[d]);
    const start = starts[d] + share * (starts[d + 1] - starts[d]);
    return [d + share, clamp((ox * field.along[0] + oy * field.along[1] - start) / field.ascan, 0, field.columns - 1)];
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

  // The least-squares fit of n unknowns: x of A x = b, A symmetric [4 * 4], by Gaussian elimination.
  function solved(A, b, n) {
    const rows = Array.from({ length: n }, (_, i) => [...A.slice(4 * i, 4 * i + n), b[i]]), x = [];
    for (let i = 0; i < n; i++) for (let k = i + 1; k < n; k++) {
      const times = rows[k][i] / rows[i][i];
      for (let j = i; j <= n; j++) rows[k][j] -= times * rows[i][j];
    }
    for (let i = n - 1; i >= 0; i--) {
      let left = rows[i][n];
      for (let j = i + 1; j < n; j++) left -= rows[i][j] * x[j];
      x[i] = left / rows[i][i];
    }
    return x;
  }

  // Depressions that could be the pit, the likeliest first: [x, y] in mm. As find_pits of octfm.volume.etdrs.
  function findPits(thickness, field, rules) {
    const { cell, step } = rules, steps = Math.round(step / cell);
    const reach = Math.round(rules.reach / step), around = Math.round(rules.around / step), half = reach + around;
    const axis = range(-steps * half, steps * half + 1, 1).map((k) => cell * k), n = axis.length;
    const xs = axis.map((v) => field.centre[0] + v), ys = axis.map((v) => field.centre[1] + v);
    const measured = sample(thickness, field, xs, ys, rules), known = measured.map((v) => v === v ? 1 : 0);
    if (known.reduce((a, b) => a + b, 0) / known.length < 0.5) return [];
    const weight = smoothed(known, n, step / cell), smooth = smoothed(measured.map((v) => v === v ? v : 0), n, step / cell);
    for (let i = 0; i < n * n; i++) {
      smooth[i] /= Math.max(weight[i], 1e-6);
      if (weight[i] < 0.5) weight[i] = 0;
    }
    const disc = [];
    for (let j = -around; j <= around; j++) for (let i = -around; i <= around; i++) {
      const x = step * i, y = step * j;
      if (Math.hypot(x, y) <= rules.around + 1e-9)
        disc.push([steps * (j * n + i), [1, x, y, -Math.exp(-(x * x + y * y) / rules.radius ** 2)]]);
    }
    const size = 2 * reach + 1, likely = new Float64Array(size * size).fill(-Infinity), fit = new Float64Array(size * size);
    for (let row = 0; row < size; row++) for (let column = 0; column < size; column++) {
      const at = steps * ((row + around) * n + column + around), A = new Float64Array(16), b = new Float64Array(4);
      let count = 0, sum = 0, all = 0, squares = 0;
      for (const [off] of disc) { const w = weight[at + off]; if (w > 0) count++; all += w; sum += w * smooth[at + off]; }
      if (count / disc.length < 0.5) continue;
      const mean = sum / Math.max(all, 1e-6);
      for (const [off, basis] of disc) {
        const w = weight[at + off], value = smooth[at + off] - mean;
        squares += w * value * value;
        for (let i = 0; i < 4; i++) { b[i] += w * value * basis[i]; for (let j = 0; j < 4; j++) A[4 * i + j] += w * basis[i] * basis[j]; }
      }
      for (let i = 0; i < 4; i++) A[5 * i] += 1e-9;
      const pit = solved(A, b, 4), slope = solved(A, b, 3), product = (x) => x.reduce((a, v, i) => a + v * b[i], 0);
      const rest = squares - product(slope), explained = product(pit) - product(slope), i = row * size + column;
      const clip = (v, high) => Math.min(Math.max(v, 0), high);
      fit[i] = clip(pit[3] / rules.pit, 1) ** 2 * clip(explained / Math.max(rest, 1e-6), 0.999);
      const off = Math.hypot(step * (row - reach), step * (column - reach)) / rules.offCentre;
      likely[i] = -rules.independent / 2 * Math.log1p(-fit[i]) - 0.5 * off * off;
    }
    const peaks = [];
    for (let row = 1; row < size - 1; row++) for (let column = 1; column < size - 1; column++) {
      const i = row * size + column;
      if (fit[i] < rules.leastFit || !(likely[i] > 0) || Math.hypot(step * (row - reach), step * (column - reach)) > rules.reach) continue;
      let highest = true;
      for (const d of [-size - 1, -size, -size + 1, -1, 1, size - 1, size, size + 1]) highest &&= likely[i] >= likely[i + d];
      if (highest) peaks.push(i);
    }
    peaks.sort((a, b) => likely[b] - likely[a] || a - b);
    const vertex = (before, middle, after) => {
      const bend = before - 2 * middle + after;
      return Number.isFinite(bend) && bend < 0 ? 0.5 * (before - after) / bend : 0;
    };
    const places = [], apart = (place) => places.every((other) => Math.hypot(place[0] - other[0], place[1] - other[1]) >= rules.apart);
    for (const i of peaks) {
      if (likely[i] < likely[peaks[0]] - rules.rival) break;
      const right = vertex(likely[i - 1], likely[i], likely[i + 1]), down = vertex(likely[i - size], likely[i], likely[i + size]);
      const place = [field.centre[0] + step * (i % size - reach + right), field.centre[1] + step * (Math.floor(i / size) - reach + down)];
      if (apart(place)) places.push(place);
    }
    // A fovea in the middle of the scan whose pit cannot be seen has the log-likelihood 0.
    if (peaks.length && likely[peaks[0]] < rules.rival && apart(field.centre)) places.push(field.centre);
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
    const found = sample(values, field, axis.map((v) => centre[0] + v), axis.map((v) => centre[1] + v), rules);
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

  // Zone → distance of neighbouring B-scans that is not exceeded in most of it.
  function apartAt(field, rules, centre) {
    const { axis, names, zone } = field.grid ||= zonesOf(field, rules), n = axis.length, gaps = names.map(() => []);
    for (let i = 0; i < zone.length; i++) {
      if (zone[i] < 0) continue;
      const ox = centre[0] + axis[i % n] - field.origin[0], oy = centre[1] + axis[Math.floor(i / n)] - field.origin[1];
      const d = below(field.bscans, ox * field.across[0] + oy * field.across[1]);
      gaps[zone[i]].push(field.bscans[d + 1] - field.bscans[d]);
    }
    return Object.fromEntries(names.map((name, z) => [name, gaps[z].sort((a, b) => a - b)[Math.floor(rules.covered * (gaps[z].length - 1))]]));
  }

  // The grid of a thickness map, around the pit of `pitMap` or a fovea [B-scan, A-scan] that was set, without the zones
  // that cannot be trusted.
  function measure(thickness, pitMap, expected, field, rules, fovea) {
    const [pit, ...rivals] = fovea ? [placeOf(fovea, field)] : findPits(pitMap, field, rules), centre = pit || field.centre;
    const raw = meansAt(thickness, field, rules, centre), error = meansAt(expected, field, rules, centre), withheld = new Set();
    for (const name of Object.keys(raw.mean)) if ((error.mean[name] || 0) > rules.zoneUm) withheld.add(name);
    const perVolume = 1000 / (Math.PI * rules.rings[2] ** 2), stays = (one, other, scale) => one === null || (other !== null && Math.abs(one - other) * scale <= rules.placeUm);
    const { bscans } = field, perMm = (bscans.length - 1) / (bscans[bscans.length - 1] - bscans[0]), near = apartAt(field, rules, centre);
    const sparse = Object.keys(raw.mean).filter((name) => {
      const most = rules.mostApart[name.split(" ")[0]];
      return perMm * most < 1 - 1e-6 || near[name] > rules.unevenBy * most;
    });
    let trusted = (error.volume || 0) * perVolume <= rules.zoneUm && !sparse.some((name) => name.startsWith("inner"));
    for (const rival of rivals) {
      const other = meansAt(thickness, field, rules, rival);
      for (const [name, mean] of Object.entries(raw.mean)) if (!stays(mean, other.mean[name], 1)) withheld.add(name);
      trusted &&= stays(raw.volume, other.volume, perVolume);
    }
    const mean = Object.fromEntries(Object.entries(raw.mean).map(([name, value]) => [name, withheld.has(name) || sparse.includes(name) ? null : value]));
    const unsure = [...withheld].filter((name) => !sparse.includes(name) && raw.coverage[name] >= rules.covered);
    const away = rivals.map((rival) => Math.hypot(rival[0] - centre[0], rival[1] - centre[1]));
    return { mean, coverage: raw.coverage, volume: trusted ? raw.volume : null, centre, onPit: Boolean(pit), withheld: unsure, sparse,
      furthest: Math.max(...(sparse.length ? sparse.map((name) => near[name]) : bscans.slice(1).map((at, d) => at - bscans[d]))), rival: Math.min(...away) };
  }

  return { measure, meansAt, findPits, sample, placeOf, indexOf };
})();
